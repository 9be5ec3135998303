"""tools/retry_failed.py runs failed tests a second time, alone, and fails if they fail again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "retry_failed.py"
PASSES_THE_SECOND_TIME = """
from pathlib import Path

def test_flaky():
    marker = Path("ran_before")
    first = not marker.exists()
    marker.touch()
    assert not first
"""


def run_suite(folder: Path, source: str, *arguments: str) -> tuple[int, str]:
    """Run the script on a suite of one file; returns the exit status and the output."""
    (folder / "test_suite.py").write_text(source)
    # Without the variables that this pytest session and its workers have set.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_it_works(tmp_path: Path) -> None:
    status, output = run_suite(tmp_path, "def test_fine(): pass")
    assert status == 0
    assert output.count("test session starts") == 1


def test_lists_a_test_that_passes_the_second_time(tmp_path: Path) -> None:
    status, output = run_suite(tmp_path, PASSES_THE_SECOND_TIME + "\ndef test_fine(): pass")
    assert status == 0
    assert output.endswith("\nFailed beside other tests, passed alone:\n  test_suite.py::test_flaky\n")
    assert "1 passed" in output.rpartition("test session starts")[2]


def test_fails_if_a_test_fails_twice(tmp_path: Path) -> None:
    source = PASSES_THE_SECOND_TIME + "\ndef test_broken(): assert False"
    status, output = run_suite(tmp_path, source)
    assert status == 1
    assert "passed alone:\n  test_suite.py::test_flaky\n" in output
    assert output.endswith("\nFailed twice:\n  test_suite.py::test_broken\n")


def test_fails_if_the_second_run_does_not_find_a_failed_test(tmp_path: Path) -> None:
    source = (
        PASSES_THE_SECOND_TIME
        + """
if not Path("ran_before").exists():
    def test_disappears(): assert False
"""
    )
    status, output = run_suite(tmp_path, source)
    assert status == 1
    assert output.endswith("\nFailed twice:\n  test_suite.py::test_disappears\n")


def test_does_not_retry_more_than_ten(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.mark.parametrize("number", range(11))
def test_broken(number): assert False
"""
    status, output = run_suite(tmp_path, source)
    assert status == 1
    assert "11 tests failed: no second run" in output
    assert output.count("test session starts") == 1


def test_does_not_retry_a_file_that_cannot_be_collected(tmp_path: Path) -> None:
    status, output = run_suite(tmp_path, "import no_such_module")
    assert status == 2
    assert output.count("test session starts") == 1


def test_the_second_run_is_one_process(tmp_path: Path) -> None:
    source = (
        PASSES_THE_SECOND_TIME
        + """
def test_alone():
    import os
    assert "PYTEST_XDIST_WORKER" not in os.environ
"""
    )
    (tmp_path / "ran_before").touch()
    status, output = run_suite(tmp_path, source, "-p", "xdist", "--numprocesses", "2", "--dist=worksteal")
    assert status == 0
    assert "passed alone:\n  test_suite.py::test_alone\n" in output
