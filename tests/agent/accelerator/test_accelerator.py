"""The agent and the kernels on an accelerator that is not CUDA: an emulated one, in a process of its own."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agent.helpers.emulated_accelerator import LIBRARY, build

ROOT = Path(__file__).parents[3]
OWN = tuple(Path(__file__).with_name(f"on_{name}.py") for name in ("accelerator", "capture"))
AGENT = ROOT / "tests" / "agent"

# Tests of each part of the agent, whose tensors are then all on the accelerator.
ELSEWHERE = (
    "session/test_never_waits.py::test_it_works",
    "control/test_reference_window.py::test_it_works",
    "control/test_bisection.py::test_it_works",
    "control/test_precision.py::test_it_works",
    "autolog/test_attach.py::test_it_works",
    "autolog/test_attach.py::test_the_training_is_the_same_with_and_without",
    "incidents/test_flight_recorder.py::test_a_critical_alert_keeps_the_steps",
    "incidents/test_incident_docs.py::test_it_works",
    "observe/tensors/test_optimizer_state.py::test_it_works",
)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
def test_it_works(tmp_path: Path) -> None:
    library = tmp_path / "accelerator.so"
    build(library)
    tests = [*map(str, OWN), *(str(AGENT / test) for test in ELSEWHERE)]
    plugins = ("-p", "agent.helpers.emulated_accelerator", "-p", "no:cacheprovider", "-p", "no:xdist")
    # Its own folder: pytest makes the shared one private again, where PostgreSQL of other tests has files.
    folder = ("--basetemp", str(tmp_path / "inner"))
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *folder, *tests],
        env={**os.environ, LIBRARY: str(library), "PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed and int(passed[1]) >= 25, finished.stdout
    assert "skipped" not in finished.stdout


def test_only_one_module_names_a_kind_of_accelerator() -> None:
    named = []
    for source in (ROOT / "agent" / "fp8scope", ROOT / "kernels" / "fp8scope_kernels"):
        for path in source.rglob("*.py"):
            if path.name != "devices.py":
                named += [f"{path.relative_to(ROOT)}:{line}" for line in _kinds(path)]
    assert not named


def _kinds(path: Path) -> list[int]:
    """The lines that use `torch.cuda` or `is_cuda`, or compare with "cuda"."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            is_version = isinstance(node.value, ast.Attribute) and node.value.attr == "version"
            lines += [] if is_version else [node.lineno]
        if isinstance(node, ast.Compare):
            constants = [value for value in (node.left, *node.comparators) if isinstance(value, ast.Constant)]
            lines += [node.lineno for value in constants if value.value == "cuda"]
    return lines
