"""Processes that are forks of one that has imported the server's code."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from dashboard.helpers.installation import clean_environment
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers import children
from fp8scope_dashboard.servers.children import Child, LogFile
from fp8scope_dashboard.servers.forks import ForkServer

PROGRAM = """
import os, signal, sys, time

if sys.argv[1] == "print":
    # Imported by the fork server.
    print(sys.argv[1:-1], "django.urls" in sys.modules, os.getsid(0) == os.getpid(), flush=True)
    os.write(int(sys.argv[-1]), b"through the descriptor")
elif sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
elif sys.argv[1] == "atexit":
    import atexit
    atexit.register(lambda: print("at the end", flush=True))
elif sys.argv[1] == "raise":
    raise RuntimeError("planned")
else:
    print("sleeps", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose processes find the module `program`."""
    folder = tmp_path_factory.mktemp("forks")
    (folder / "program.py").write_text(PROGRAM)
    environment = {
        **clean_environment(),
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
        "FP8SCOPE_SECRET_KEY": "k" * 64,
        "FP8SCOPE_DATA_DIR": str(folder),
        "PYTHONPATH": str(folder),
    }
    with (
        closing(LogFile(folder, "fork_server")) as log,
        closing(ForkServer(log, folder, environment)) as made,
    ):
        made.child.launch()
        wait_until(made.is_ready, "the fork server has imported everything")
        yield made
        children.stop_together([made.child], 60, lambda: False)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogFile]:
    with closing(LogFile(tmp_path, "child")) as file:
        yield file


def text_of(log: LogFile, tmp_path: Path, awaited: str) -> str:
    """What a child has printed, once it contains `awaited`."""
    file = tmp_path / f"{log.name}.log"
    wait_until(lambda: file.exists() and awaited in file.read_text(), f"{awaited!r} is printed")
    return file.read_text()


def launched(server: ForkServer, log: LogFile, *arguments: str, inherit: tuple[int, ...] = ()) -> Child:
    child = server.python_child("child", ["program", *arguments], log, inherit=inherit)
    child.launch()
    return child


def test_it_works(server: ForkServer, log: LogFile, tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    child = launched(server, log, "print", "word", "fd:0", inherit=(write_fd,))
    os.close(write_fd)
    assert child.running is not None and server.child.running is not None
    assert child.running.wait() == 0
    assert text_of(log, tmp_path, "\n") == "['print', 'word'] True True\n"
    # To the end: no other process holds the descriptor.
    with os.fdopen(read_fd, "rb") as stream:
        assert stream.read() == b"through the descriptor"


@pytest.mark.parametrize(("arguments", "code"), [(("exit", "3"), 3), (("raise",), 1), (("atexit",), 0)])
def test_ends_as_a_program_does(
    server: ForkServer, log: LogFile, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    child = launched(server, log, *arguments)
    assert child.running is not None and child.running.wait() == code
    if code != 3:
        text_of(log, tmp_path, "at the end" if code == 0 else "RuntimeError: planned")


def test_a_process_is_told_apart_and_stopped(server: ForkServer, log: LogFile, tmp_path: Path) -> None:
    child = launched(server, log, "sleep")
    assert child.running is not None and server.child.running is not None
    process = psutil.Process(child.running.pid)
    assert process.ppid() == server.child.running.pid
    text_of(log, tmp_path, "sleeps")
    assert process.name() == "fp8scope child"
    assert child.running.poll() is None
    running = child.running
    children.stop_together([child], 60, lambda: False)
    assert running.poll() == -signal.SIGTERM
    running.send_signal(signal.SIGKILL)  # Its number may be another's by now: nothing is sent.


def test_a_process_that_is_killed_at_once_is_noticed(server: ForkServer, log: LogFile) -> None:
    child = launched(server, log, "sleep")
    assert child.running is not None
    running = child.running
    children.stop_together([child], 60, hurry=lambda: True)
    assert running.poll() in (-signal.SIGTERM, -signal.SIGKILL)


def test_processes_end_with_the_fork_server(server: ForkServer, log: LogFile, tmp_path: Path) -> None:
    """And start again once it runs again."""
    child = launched(server, log, "sleep")
    text_of(log, tmp_path, "sleeps")
    assert child.running is not None and server.child.running is not None
    process = psutil.Process(child.running.pid)
    os.kill(server.child.running.pid, signal.SIGKILL)
    assert processes.wait_ended([process], 60) == []
    wait_until(lambda: "was ended by SIGKILL" in (child.restart_if_ended() or ""), "the child's end is seen")
    assert not server.is_ready()
    with pytest.raises(ServerError, match="the fork server has ended"):
        child.launch()
    assert server.child.restart_if_ended() is not None
    wait_until(lambda: (server.child.restart_if_ended() or "").startswith("fork_server restarted"), "restart")
    # The child waits for the imports, instead of failing again and again.
    wait_until(lambda: child.restart_if_ended() is not None, "the child is started again")
    assert child.failures == 1
    children.stop_together([child], 60, lambda: False)
