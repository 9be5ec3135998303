"""Every code block of the documents is run, or read by the program that it is written for."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from helpers.code_blocks import CodeBlock, code_blocks, command_lines

from fp8scope.cli import main as cli

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# The tests that run the Python of a document, all of its blocks. `fragments` completes those that leave out a
# model, an optimizer or a loader.
PYTHON = {
    "README.md": "agent/test_document_fragments.py",
    "docs/agent.md": "agent/test_docs.py",
    "docs/capture.md": "agent/test_document_fragments.py",
    "docs/channels.md": "agent/test_document_fragments.py",
    "docs/client.md": "contract/test_client_docs.py",
    "docs/control.md": "agent/control/test_docs.py",
    "docs/distributed.md": "agent/test_document_fragments.py",
    "docs/evaluations.md": "agent/test_document_fragments.py",
    "docs/media.md": "agent/recording/test_media.py",
    "docs/incidents.md": "agent/incidents/test_incident_docs.py",
    "docs/otlp.md": "agent/test_document_fragments.py",
    "docs/watching.md": "agent/observe/tensors/test_end_to_end.py",
}
# Read by a program that the tests do not have; what it names is tested beside the server's own settings.
ELSEWHERE = {
    "nginx": ["docs/operating.md"],
    "text": ["docs/browsing.md", "docs/distributed_store.md", "docs/importing.md", "docs/wire.md"],
}
SQL = {"docs/grafana.md": "dashboard/sql_views/test_documented_queries.py"}


class Accepted(Exception):
    """A command has accepted its arguments."""


def test_it_works() -> None:
    languages = {block.language for block in code_blocks()}
    assert languages == {"bash", "json", "python", "sql", "toml", "yaml", *ELSEWHERE}
    for language, documents in ELSEWHERE.items():
        assert sorted({block.document for block in code_blocks(language)}) == documents


@pytest.mark.parametrize(("language", "tests"), [("python", PYTHON), ("sql", SQL)])
def test_every_document_with_code_has_a_test_that_runs_it(language: str, tests: dict[str, str]) -> None:
    assert {block.document for block in code_blocks(language)} == tests.keys()
    for document, test in tests.items():
        assert Path(document).name in (TESTS / test).read_text(), test


@pytest.mark.parametrize("block", code_blocks("json", "yaml", "toml"), ids=str)
def test_data_can_be_read(block: CodeBlock) -> None:
    read: Any = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[block.language]
    assert read(block.text)


@pytest.mark.parametrize("block", code_blocks("bash"), ids=str)
def test_the_shell_can_read_it(block: CodeBlock) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Followed by a word: elsewhere it is the name of a user, a service, a database.
OURS = command_lines(r"(?:^|\s)fp8scope ([a-z][\w-]*(?:\s.*)?)$")


@pytest.mark.parametrize(("document", "line"), OURS)
def test_our_commands_accept_the_arguments(document: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where the command would begin its work."""
    parse = argparse.ArgumentParser.parse_known_args

    def accept(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> NoReturn:
        # The parser of a subcommand is called by that of its command.
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        parser.parse_args(*arguments, **named)
        raise Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", accept)
    words = shlex.split(line)
    end = next((index for index, word in enumerate(words) if word in ("<", ">", "|", "&&")), len(words))
    with pytest.raises(Accepted):
        cli.main(words[:end])


@pytest.mark.parametrize(("document", "line"), command_lines(r"^make (.*)$"))
def test_the_targets_of_make_exist(document: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert shlex.split(line)[0] in targets


@pytest.mark.parametrize(("document", "line"), command_lines(r"\bpip install (.*)$"))
def test_the_extras_that_pip_installs_exist(document: str, line: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\[([\w,]+)\]", line):
        assert set(names.split(",")) <= extras.keys()
