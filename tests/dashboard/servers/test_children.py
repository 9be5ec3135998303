"""Supervised children: restarts, their delays, and stopping by ever stronger signals."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.servers import children
from fp8scope_dashboard.servers.children import Child, LogFile

STUBBORN = """
import signal, sys, time
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogFile]:
    file = LogFile(tmp_path, "child")
    yield file
    file.close()


def child_of(
    log: LogFile, *command: str, stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
) -> Child:
    def start(output: int) -> subprocess.Popen[bytes]:
        return processes.spawn(command, death_signal=signal.SIGKILL, output=output)

    return Child(name="child", start=start, log=log, stop_signals=stop_signals)


def stubborn(log: LogFile, tmp_path: Path, *ignored: str, stop_signals: tuple[signal.Signals, ...]) -> Child:
    child = child_of(log, sys.executable, "-c", STUBBORN, *ignored, stop_signals=stop_signals)
    child.launch()
    wait_until(lambda: "ready" in (tmp_path / "child.log").read_text(), "the child ignores its signals")
    return child


def test_it_works(log: LogFile) -> None:
    child = child_of(log, "sleep", "600")
    child.launch()
    assert child.running is not None
    assert child.restart_if_ended() is None
    child.running.kill()
    child.running.wait()
    assert child.restart_if_ended() == "child was ended by SIGKILL; restarting it in 0.25 s"
    wait_until(lambda: child.restart_if_ended() is not None, "the child is started again")
    assert child.running is not None
    children.stop_together([child], grace=60, hurry=lambda: False)
    assert child.running is None


def test_each_failure_in_a_row_doubles_the_delay(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(log, "false")
    delays = []
    now = itertools.count(1000.0, 0.001)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    for _ in range(10):
        child.launch()
        assert child.running is not None
        child.running.wait()
        event = child.restart_if_ended() or ""
        assert event.startswith("child ended with exit status 1; restarting it in ")
        delays.append(float(event.split()[-2]))
    assert delays == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_healthy_period_resets_the_delay(log: LogFile) -> None:
    child = child_of(log, "true")
    child.failures = 8
    child.launch()
    child.started_at = time.monotonic() - children.HEALTHY_SECONDS - 1
    assert child.running is not None
    child.running.wait()
    assert (child.restart_if_ended() or "").endswith("in 0.25 s")
    assert child.failures == 1


def test_a_missing_program_counts_as_a_failure(log: LogFile) -> None:
    def start(output: int) -> subprocess.Popen[bytes]:
        raise FileNotFoundError(2, "No such file", "postgres")

    child = Child(name="child", start=start, log=log)
    assert (child.restart_if_ended() or "").startswith("child could not be started: [Errno 2] No such file")
    assert child.restart_if_ended() is None
    assert child.failures == 1


def test_sends_the_next_signal_if_one_is_ignored(log: LogFile, tmp_path: Path) -> None:
    child = stubborn(log, tmp_path, "SIGTERM", stop_signals=(signal.SIGTERM, signal.SIGINT))
    running = child.running
    assert running is not None
    children.stop_together([child], grace=3.0, hurry=lambda: False)
    # This is Python's exit status for SIGINT, so the second signal ended it.
    assert running.poll() == -signal.SIGINT


def test_kills_a_child_that_ignores_all_signals(log: LogFile, tmp_path: Path) -> None:
    child = stubborn(log, tmp_path, "SIGTERM", stop_signals=(signal.SIGTERM,))
    running = child.running
    assert running is not None
    children.stop_together([child], grace=0.2, hurry=lambda: False)
    assert running.poll() == -signal.SIGKILL


def test_hurry_ends_the_grace_period(log: LogFile, tmp_path: Path) -> None:
    child = stubborn(log, tmp_path, "SIGTERM", stop_signals=(signal.SIGTERM,))
    running = child.running
    children.stop_together([child], grace=1e9, hurry=lambda: True)
    assert running is not None and running.poll() == -signal.SIGKILL


def test_stopping_a_child_ends_its_descendants(log: LogFile, tmp_path: Path) -> None:
    child = child_of(log, "sh", "-c", "sleep 600 & echo $!; exec sleep 600")
    child.launch()
    wait_until(
        lambda: (tmp_path / "child.log").read_text().endswith("\n"), "the pid of the grandchild is printed"
    )
    grandchild = psutil.Process(int((tmp_path / "child.log").read_text()))
    children.stop_together([child], grace=60, hurry=lambda: False)
    assert processes.wait_ended([grandchild], 60) == []


def test_reaps_survivors_that_are_suspended_or_ignore_signals(log: LogFile, tmp_path: Path) -> None:
    ignoring = stubborn(log, tmp_path, "SIGTERM", stop_signals=())
    suspended = child_of(log, "sleep", "600")
    suspended.launch()
    assert ignoring.running is not None and suspended.running is not None
    suspended.running.send_signal(signal.SIGSTOP)
    pids = {ignoring.running.pid, suspended.running.pid}
    assert set(processes.reap(lambda process: process.pid in pids, signal.SIGTERM, timeout=0.5)) == pids
    assert ignoring.running.wait() == -signal.SIGKILL
    assert suspended.running.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-9, "by SIGKILL"),
        (-11, "by SIGSEGV"),
        (-99, "by signal 99"),
    ],
)
def test_describes_exit_codes(code: int, words: str) -> None:
    assert children.describe_exit(code).endswith(words)
