"""Child processes that die with their parent, and the search for those that an earlier start left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from fp8scope_dashboard.embedded import exec_with_death_signal


class ServerError(Exception):
    """A server cannot be started or reached; the message says what to do."""


class AlreadyRunningError(ServerError):
    """Another process holds the directory's lock."""


@dataclass(frozen=True)
class Account:
    """The system user that a child runs as."""

    uid: int
    gid: int


def spawn(
    command: Sequence[str],
    *,
    death_signal: signal.Signals,
    output: int | IO[bytes],
    account: Account | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` as a child in a new session, so that a terminal's Ctrl-C does not reach it.

    The kernel sends `death_signal` to the child when the *thread* that called `spawn` ends. Call it from a
    thread that lives as long as the child.

    Args:
        output: receives stdout and stderr.
        inherit: file descriptors that the child keeps.
    """
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    script = exec_with_death_signal.__file__
    arguments = [str(number) for number in (os.getpid(), int(death_signal), uid, gid)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, *arguments, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environment,
        start_new_session=True,
        pass_fds=inherit,
    )


def stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals, timeout: float) -> None:
    """Send `stop_signal`, wait up to `timeout` seconds, then kill what is left of the session."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(stop_signal)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    kill_session(process.pid)
    process.wait()


def kill_session(session: int) -> None:
    """Send SIGKILL to the process group of a child. Its own children can outlive it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)


def find(matches: Callable[[psutil.Process], bool]) -> Iterator[psutil.Process]:
    """Processes that match. Skips those that end meanwhile or that this user may not inspect."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and matches(process):
                yield process


def runs_in(directory: Path, programs: Iterable[str]) -> Callable[[psutil.Process], bool]:
    """Match processes by program name and working directory.

    PostgreSQL and Redis change into their data directory. Unlike a pid file, the working directory is still
    right after a reboot, in a new container that reuses pids, and for a backend whose postmaster was killed.
    """
    names, directory_name = set(programs), str(directory.resolve())
    return lambda process: process.name() in names and process.cwd() == directory_name


def reap(matches: Callable[[psutil.Process], bool], stop_signal: signal.Signals, timeout: float) -> list[int]:
    """Stop every matching process, with SIGKILL after `timeout` seconds. Returns their pids."""
    processes = list(find(matches))
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(stop_signal)
            # A suspended process handles the signal only once it continues.
            process.send_signal(signal.SIGCONT)
    for process in wait_ended(processes, timeout):
        with suppress(psutil.Error):
            process.kill()
    wait_ended(processes, timeout)
    return [process.pid for process in processes]


def wait_ended(processes: Iterable[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait up to `timeout` seconds for processes that need not be children; returns those still running.

    A zombie counts as ended. In a container whose init process collects no zombies they stay in the process
    table forever, and psutil's wait would use up the whole timeout.
    """
    deadline = time.monotonic() + timeout
    alive = [process for process in processes if not has_ended(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [process for process in alive if not has_ended(process)]
    return alive


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process has exited; true for a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on `directory/lock`. The kernel releases it when this process dies.

    Raises:
        AlreadyRunningError: another process holds the lock.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunningError(
                f"{directory} is in use by process {holder}: stop it, or choose another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
