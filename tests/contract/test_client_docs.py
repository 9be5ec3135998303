"""The code of docs/client.md runs as it stands there, and its tables name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dashboard.helpers.seeding import seed_project
from helpers.code_blocks import texts_of
from helpers.live_servers import Server

from fp8scope.cli.main import main
from fp8scope_dashboard.runs.models import Run

DOCUMENT = Path(__file__).parents[2] / "docs" / "client.md"
TEXT = DOCUMENT.read_text()
BLOCKS = texts_of(DOCUMENT)
COMMANDS = re.findall(r"^fp8scope (?!completion)(.*)$", TEXT, re.MULTILINE)


@pytest.fixture
def environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_project(server.project, 150)
    Run.objects.update(config={"layers": 6, "lr": 3e-4})
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


def test_it_works(environment: None, tmp_path: Path) -> None:
    outputs = []
    for number, block in enumerate(BLOCKS):
        path = tmp_path / f"block{number}.py"
        path.write_text(block)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (block, done.stderr)
        outputs.append(done.stdout)
    runs, curves, verdicts, notebook = outputs
    assert "gpt fp8 delayed finished 149" in runs and "'layers': 6" in runs
    assert curves.splitlines() == ["150 150 False", "50 (48, 150)"]
    assert (
        verdicts.startswith("Worse than BF16")
        and "not judged:" in verdicts
        and "heldout accuracy" in verdicts
    )
    assert "'loss'" in notebook and '<div class="fp8scope' in notebook


def test_the_commands_run(environment: None, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    assert len(COMMANDS) == 8
    for line in COMMANDS:
        arguments = shlex.split(line, comments=True)
        assert main(arguments) == 0, line
        output = capsys.readouterr()
        assert output.out or "No run matches" in output.err


def test_every_command_that_reads_is_described() -> None:
    modules = (DOCUMENT.parents[1] / "agent/fp8scope/cli/reading").glob("*.py")
    made = {name for path in modules for name in re.findall(r'parser_of\("(\w+)"', path.read_text())}
    assert made == {"runs", "show", "compare", "tail", "alerts", "open", "media", "card"}
    assert made <= {line.split()[0] for line in COMMANDS}
    assert made <= set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
