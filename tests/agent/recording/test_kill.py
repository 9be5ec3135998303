"""`kill -9` of a training process, then `fp8scope sync`: at most the last step is lost, none is doubled."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

from fp8scope.cli import main as cli
from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.recording.records import Bytes
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.segments import FileSegment
from fp8scope.recording.spool import find_spools
from fp8scope.run import Run

# The child tells on its standard output each step that it has completed, before it begins the next.
CHILD = """
import os, sys, time
import fp8scope
if len(sys.argv) > 2:
    from fp8scope.recording import segments
    class Slow:
        def __getattr__(self, name):
            return getattr(os, name)
        def pwrite(self, *arguments):
            time.sleep(float(sys.argv[2]))
            return os.pwrite(*arguments)
    segments.os = Slow()
pause = float(sys.argv[1])
run = fp8scope.init(name="victim")
number = 0
while True:
    with run.step(tokens=10) as step:
        time.sleep(pause)
        step.log({f"value{index}": index + number for index in range(10)}, loss=1.0 / (number + 1))
    number += 1
    os.write(1, b"%d\\n" % number)
"""


def kill_a_run(
    tmp_path: Path, server: WireServer, steps: int, pause: float = 0.001, disk: float | None = None
) -> int:
    """Let the child complete `steps` steps or a few more, kill it, and return how many it completed."""
    environment = {**os.environ, "FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token}
    environment |= {"FP8SCOPE_INTERVAL": "0.05", "FP8SCOPE_DIR": str(tmp_path / "spool")}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(pause), *([] if disk is None else [str(disk)])],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    with child:
        for _ in range(steps):
            assert child.stdout.readline(), child.stderr.read()
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
    return int(rest[-1]) if rest else steps


def sync(tmp_path: Path, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    return cli.main(["sync", str(tmp_path)])


def assert_at_most_one_lost(server: WireServer, completed: int) -> None:
    # Killed right after its first step, a run may be unknown to the server.
    stored = server.run.steps if server.runs else []
    assert stored == list(range(1, len(stored) + 1)), "a step is doubled or missing in the middle"
    # The step that was under way may have been completed, but not printed, when the signal came.
    assert completed - 1 <= len(stored) <= completed + 1


def test_it_works(tmp_path: Path, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = kill_a_run(tmp_path, server, steps=100)
    written = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for path in (tmp_path / "spool").rglob("*.log"):
        os.utime(path, (written.timestamp(), written.timestamp()))
    assert sync(tmp_path, server, monkeypatch) == 0
    assert_at_most_one_lost(server, completed)
    assert datetime.fromisoformat(server.run.finish["finished_at"]) == written, "not when the rest was sent"
    assert list((tmp_path / "spool").rglob("*.log")) == []
    # Nobody could say how it ended but the one who found its spool.
    assert server.run.finish["state"] == "failed" and "was killed" in server.run.finish["error"]
    assert server.run.finish["rows_sent"] == len(server.run.steps)


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 211])
@pytest.mark.parametrize("pause", [0.0, 0.003])
def test_at_many_moments(
    steps: int, pause: float, tmp_path: Path, server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = kill_a_run(tmp_path, server, steps, pause)
    assert sync(tmp_path, server, monkeypatch) == 0
    assert_at_most_one_lost(server, completed)


@pytest.mark.parametrize("steps", [2, 9, 20])
def test_a_disk_that_is_slower_than_the_steps(
    steps: int, tmp_path: Path, server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a step waits for the row of the one before."""
    completed = kill_a_run(tmp_path, server, steps, pause=0.0, disk=0.02)
    assert sync(tmp_path, server, monkeypatch) == 0
    assert_at_most_one_lost(server, completed)


def test_a_disk_that_hangs_does_not_stop_the_training(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, hangs = threading.Event(), threading.Event()
    append = FileSegment.append

    def hang(self: FileSegment, *pieces: Bytes) -> None:
        hangs.set()
        released.wait(120)
        append(self, *pieces)

    monkeypatch.setattr(FileSegment, "append", hang)
    run = Run(settings, blank_registration("hanging disk"))
    for _ in range(50):
        with run.step() as step:
            step.log(loss=1.0)
    # Every one of them has ended while not one was written.
    assert hangs.is_set() and not released.is_set()
    released.set()
    assert run.finish(60).complete and server.run.steps == list(range(1, 51))


def test_while_the_server_does_not_answer(
    tmp_path: Path, server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.plan = lambda method, path: Fault(drop=True, after=True) if "/batches" in path else None
    completed = kill_a_run(tmp_path, server, steps=150)
    server.plan = lambda method, path: None
    assert sync(tmp_path, server, monkeypatch) == 0
    assert_at_most_one_lost(server, completed)


def test_sync_leaves_a_living_process_alone(
    tmp_path: Path, server: WireServer, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(settings, blank_registration("alive"))
    wait_until(run.directory.joinpath("cursor").exists, "the spool's cursor")
    assert "running process" in send_spool(run.directory, settings, 1.0).problem
    with run.step() as step:
        step.log(loss=1.0)
    assert run.finish().complete and server.run.steps == [1]


def test_a_lock_that_a_child_of_the_killed_process_still_has_is_waited_for(
    tmp_path: Path, server: WireServer, settings: Settings
) -> None:
    """As git has it between fork and exec, if the process is killed while it starts git."""
    kill_a_run(tmp_path, server, steps=20)
    (spool,) = find_spools(tmp_path / "spool")
    (lock,) = spool.rglob("lock")
    with lock.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.2, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        report = send_spool(spool, settings, 10.0)
    assert report.killed and not report.problem


def test_a_spool_from_another_machine_does_not_say_that_its_process_is_dead(
    tmp_path: Path, server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_a_run(tmp_path, server, steps=20)
    (lock,) = (tmp_path / "spool").rglob("lock")
    lock.write_text(lock.read_text().replace(socket.gethostname(), "elsewhere"))
    assert sync(tmp_path, server, monkeypatch) == 0
    assert server.run.finishes == [] and len(server.run.steps) >= 19


def test_a_killed_child_is_not_the_end_of_the_run(
    tmp_path: Path, server: WireServer, settings: Settings
) -> None:
    run = Run(replace(settings, interval=60), blank_registration("parent"))
    with run.step() as step:
        step.log(loss=1.0)
    child = os.fork()
    if child == 0:
        with run.step(number=7) as step:
            step.log(loss=2.0)
        with run.step(number=8) as step:
            step.log(loss=2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (spool,) = [found for found in find_spools(settings.directory) if found != run.directory]
    assert send_spool(spool, settings, 10.0).killed
    assert run.finish().complete
    ends = [(end["ends_run"], end["state"]) for end in server.run.finishes]
    assert ends == [(False, "failed"), (True, "finished")]
    assert {1, 7} <= set(server.run.steps)
