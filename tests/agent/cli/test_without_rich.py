"""The agent and its commands run on a training machine without `rich`, and show progress as plain lines."""

import io
import subprocess
import sys
import time

import pytest

from fp8scope.cli import progress
from fp8scope.cli.progress import ProgressLine

PROGRAM = """
import sys
sys.modules["rich"] = None
import fp8scope, fp8scope.cli.bisect, fp8scope.cli.main, fp8scope.control.bisection, fp8scope.demo.train
for name in ("bisect", "doctor", "export", "import", "login", "run", "sync"):
    try:
        fp8scope.cli.main.main([name, "--help"])
    except SystemExit as error:
        assert error.code == 0, name
assert fp8scope.cli.main.main(["sync", sys.argv[1]]) == 0
"""


def test_every_command_works_without_rich(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_token")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: fp8scope ") == 7 and "Nothing to send." in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prints_a_line_only_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    line = ProgressLine("sending", unit="MiB", scale=progress.MIB, stream=stream)
    line.update(1 << 20, 8 << 20)
    assert stream.getvalue() == ""
    now += progress.LINE_SECONDS
    line.update(2 << 20, 8 << 20)
    line.update(3 << 20, 8 << 20)
    line.end()
    assert stream.getvalue() == "sending: 25 % (2 of 8 MiB)\n"


def test_redraws_and_clears_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = Terminal()
    line = ProgressLine("rows", stream=stream)
    for done in (0, 5, 10):
        now += progress.REDRAW_SECONDS
        line.update(done, 10)
    line.end()
    shown = [text.strip() for text in stream.getvalue().split("\r")]
    assert shown == ["", "rows: 0 % (0 of 10)", "rows: 50 % (5 of 10)", "rows: 100 % (10 of 10)", "", ""]
