"""The code of docs/agent.md runs as it stands there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent.helpers.documents import run_block
from agent.helpers.wire_server import WireServer
from helpers.code_blocks import texts_of

from fp8scope.metadata.launchers import LAUNCHERS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "agent.md"
BLOCKS = texts_of(DOCUMENT)


(STEP_BY_STEP,) = [block for block in BLOCKS if "log_eval" in block]


def test_it_works(server: WireServer, tmp_path: Path) -> None:
    run_block(STEP_BY_STEP, server, tmp_path)
    stored = server.run
    assert stored.steps == list(range(1, 21)) and stored.finish["state"] == "finished"
    assert stored.registration["precision"] == "fp8" and stored.registration["group"] == "fp8-delayed"
    assert stored.finish["points_sent"] == stored.points >= 20 * (5 + 6 * 7)
    assert stored.finish["errors"] == 0
    assert None not in stored.scalars("loss") and stored.scalars("learning_rate") == [1e-3] * 20
    environment = stored.registration["environment"]
    assert environment["torch"] and environment["python"].startswith("3.")


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block != STEP_BY_STEP],
    ids=lambda block: re.findall(r'name="(.*?)"', block)[0],
)
def test_every_other_block(block: str, server: WireServer, tmp_path: Path) -> None:
    output = run_block(block, server, tmp_path)
    if "offline" in block:
        complete, directory = output.split()
        assert complete == "False" and Path(directory).is_dir() and server.runs == {}
    elif "resume=" in block:
        assert server.run.steps == [1, 2, 3, 4] and server.run.scalars("tokens")[-1] == 400
        assert [place["attempt"] for place in server.run.places.values()] == [0, 1]
    elif "log_artefact" in block:
        (link,) = [report["artefact"] for report in server.run.reports if report.get("name") == "artefact"]
        assert link == {"name": "Checkpoint at step 1", "address": "s3://bucket/run/step-1"}
    else:
        assert server.run.steps == [1, 2, 3] and server.run.finish["errors"] == 0
        assert None not in server.run.scalars("loss")


def test_the_document_names_every_setting() -> None:
    source = DOCUMENT.parents[1] / "agent" / "fp8scope" / "config.py"
    names = set(re.findall(r'"(FP8SCOPE_\w+)"', source.read_text()))
    assert len(names) >= 6
    assert [name for name in sorted(names) if f"`{name}`" not in DOCUMENT.read_text()] == []


def test_the_callbacks_need_no_import_but_fp8scope() -> None:
    names = sorted(set(re.findall(r"fp8scope\.integrations\.\w+\.\w+", DOCUMENT.read_text())))
    assert len(names) == 3
    program = "import fp8scope\n" + "\n".join(names)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FRAMEWORKS = DOCUMENT.parent / "frameworks.md"


def test_the_page_of_frameworks_names_what_there_is() -> None:
    """Without importing the frameworks: each name is a class or a function of its module."""
    source = DOCUMENT.parents[1] / "agent" / "fp8scope" / "integrations"
    text = FRAMEWORKS.read_text()
    named = set(re.findall(r"fp8scope\.integrations\.(\w+)\.(\w+)", text))
    assert len(named) >= 9
    for module, name in named:
        tree = ast.parse((source / f"{module}.py").read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert name in defined, (module, name)
    modules = {path.stem for path in source.glob("*.py")} - {"__init__", "common"}
    shared = {"lightning_logger", "registered_names", "run_values", "verl"}
    assert modules - shared == {module for module, _ in named} | set(
        re.findall(r"import fp8scope\.integrations\.(\w+)", text)
    )


def test_the_page_of_frameworks_names_the_variables_of_launchers() -> None:
    text = FRAMEWORKS.read_text()
    assert all(f"`{name}`" in text for names in LAUNCHERS for name in (names.rank, names.size))
