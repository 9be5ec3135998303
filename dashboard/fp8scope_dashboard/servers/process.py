"""Child processes that die with us, and the search for those that an earlier life left behind."""

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

from fp8scope_dashboard.servers import exec_with_death_signal


class ServerError(Exception):
    """A server could not be started; the message says what to do."""


class AlreadyRunningError(ServerError):
    """Another process holds the directory's lock."""


@dataclass(frozen=True)
class Account:
    """The system user a child runs as."""

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
    """Start `command` in the foreground as our child, in a session of its own.

    The kernel sends it `death_signal` when the *thread* that called `spawn` ends, so call it from a thread
    that lives as long as the child should. Its own session keeps a terminal's Ctrl-C away from it: the order
    in which servers stop is ours to choose. `output` receives stdout and stderr; `inherit` lists
    the file descriptors to hand down.
    """
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    launcher = [
        sys.executable,
        "-I",
        "-S",
        exec_with_death_signal.__file__,
        str(os.getpid()),
        str(int(death_signal)),
    ]
    return subprocess.Popen(
        [*launcher, str(uid), str(gid), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environment,
        start_new_session=True,
        pass_fds=inherit,
    )


def stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals, timeout: float) -> None:
    """Send `stop_signal`, wait up to `timeout` seconds, then kill whatever is left of its session."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(stop_signal)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    kill_session(process.pid)
    process.wait()


def kill_session(session: int) -> None:
    """SIGKILL every process of the group that a child leads: a dead leader can leave workers behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)


def find(matches: Callable[[psutil.Process], bool]) -> Iterator[psutil.Process]:
    """Processes for which `matches` is true; those that end meanwhile or belong to others are skipped."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and matches(process):
                yield process


def serves(directory: Path, programs: Iterable[str]) -> Callable[[psutil.Process], bool]:
    """Match servers by program and working directory.

    PostgreSQL and Redis both change into their data directory, so this stays true where a pid file lies:
    after a reboot, in a container that counts its pids from 1 again, and for a backend whose postmaster
    was killed.
    """
    names, place = set(programs), str(directory.resolve())
    return lambda process: process.name() in names and process.cwd() == place


def reap(matches: Callable[[psutil.Process], bool], stop_signal: signal.Signals, timeout: float) -> list[int]:
    """Stop every matching process, the hard way after `timeout` seconds. Returns their pids."""
    found = list(find(matches))
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(stop_signal)
            # One that was suspended could not obey.
            process.send_signal(signal.SIGCONT)
    for process in wait_ended(found, timeout):
        with suppress(psutil.Error):
            process.kill()
    wait_ended(found, timeout)
    return [process.pid for process in found]


def wait_ended(processes: Iterable[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait up to `timeout` seconds for processes that are not our children; returns those still at work.

    A zombie has ended: in a container whose first process collects none it stays in the table for ever,
    and psutil's own wait would sit out the whole timeout.
    """
    deadline = time.monotonic() + timeout
    alive = [process for process in processes if not has_ended(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [process for process in alive if not has_ended(process)]
    return alive


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has exited, collected by its parent or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory/lock` exclusively. The kernel lets go of it when we die, however we die.

    Raises:
        AlreadyRunningError: another process holds it.
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
