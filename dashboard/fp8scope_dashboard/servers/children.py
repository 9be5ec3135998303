"""Supervised child processes: their log files, restarts, and how they stop."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import Thread
from typing import Protocol

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.server import EmbeddedServer

MAX_LOG_BYTES = 5_000_000
BACKUPS = 3
# Longer lines are cut into several: a child's output must not fill the supervisor's memory.
MAX_LINE_BYTES = 16_384

FIRST_DELAY = 0.25
LONGEST_DELAY = 30.0
# After a life of this many seconds the next failure counts as the first.
HEALTHY_SECONDS = 60.0
# Prefork is the only pool in which Celery's time limits work. A crash in a native codec costs one task, not
# the worker, and a long analysis does not hold the interpreter lock that an alert waits for. Children share
# most of their memory. Those of alerts also wait for webhooks, so there are more than cores.
MIN_CONCURRENCY = 3
MAX_CONCURRENCY = 16
# No long job may hold up an alert: the worker of alerts takes no other queue, and the other one gives way.
ALERT_QUEUES = ("deliveries", "evaluations")
JOB_QUEUES = ("celery",)
# A worker child above this size (in KiB) is replaced after its task.
CHILD_MEMORY = 1_000_000


class Running(Protocol):
    """A process: `subprocess.Popen`, or `Forked`."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal's number; None while it runs."""

    def wait(self) -> int:
        """Wait for the exit status."""

    def send_signal(self, number: signal.Signals, /) -> None:
        """Send a signal unless the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""


Start = Callable[[int], Running]
Echo = Callable[[str, str], None]
"""Called as `echo(child, line)` for each line; it must not raise."""


class LogFile:
    """`<directory>/<name>.log` with at most (BACKUPS + 1) * max_bytes; each line also goes to `echo`."""

    def __init__(
        self, directory: Path, name: str, echo: Echo | None = None, *, max_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self.name = name
        self.echo = echo
        self._handler = RotatingFileHandler(
            directory / f"{name}.log",
            maxBytes=max_bytes,
            backupCount=BACKUPS,
            encoding="utf-8",
            errors="replace",
        )
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, line: str) -> None:
        """Write one line, given without its newline."""
        self._handler.handle(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))
        if self.echo is not None:
            self.echo(self.name, line)

    def pipe(self) -> int:
        """Create a file descriptor for a child's output. The caller closes it once the child has started.

        The reading end closes when every copy of the descriptor is closed.
        """
        read_fd, write_fd = os.pipe()
        Thread(target=self._pump, args=(read_fd,), name=f"log-{self.name}", daemon=True).start()
        return write_fd

    def close(self) -> None:
        """Close the file. A later `write` opens it again."""
        self._handler.close()

    def _pump(self, read_fd: int) -> None:
        with os.fdopen(read_fd, "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                self.write(line.decode("utf-8", errors="replace").rstrip("\r\n"))


@dataclass(kw_only=True)
class Child:
    """One supervised process.

    Args:
        name: its name on the terminal, in `pids()` and in the name of its log file.
        start: starts it with stdout and stderr going to the given file descriptor.
        log: the file that receives its output.
        stop_signals: sent one after the other, each with the supervisor's grace period, before SIGKILL.
        recover: see `EmbeddedServer.recover`; called if the process ends with an error while it starts.
        may_start: a restart waits until this is true.
    """

    name: str
    start: Start
    log: LogFile
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    recover: Callable[[], str] = lambda: ""
    may_start: Callable[[], bool] = lambda: True
    running: Running | None = None
    failures: int = 0
    started_at: float = 0.0
    due_at: float = 0.0

    def launch(self) -> None:
        """Start the process now."""
        output = self.log.pipe()
        try:
            self.running = self.start(output)
        finally:
            os.close(output)
        self.started_at = time.monotonic()

    def restart_if_ended(self) -> str | None:
        """Detect the end of the process and restart it after a delay. Returns what happened, if anything."""
        if self.running is not None:
            if (code := self.running.poll()) is None:
                return None
            processes.kill_session(self.running.pid)
            self.running = None
            message = f"{self.name} {describe_exit(code)}; restarting it in {self._schedule_restart():g} s"
            # The second end in a row: its files may be the reason.
            recovered = self.recover() if code > 0 and self.failures > 1 else ""
            return f"{message}. {recovered}" if recovered else message
        if time.monotonic() < self.due_at or not self.may_start():
            return None
        try:
            self.launch()
        except (OSError, processes.ServerError) as error:
            return f"{self.name} could not be started: {error}; next try in {self._schedule_restart():g} s"
        assert self.running is not None
        return f"{self.name} restarted as process {self.running.pid}"

    def _schedule_restart(self) -> float:
        now = time.monotonic()
        self.failures = 0 if now - self.started_at > HEALTHY_SECONDS else self.failures
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.failures, 10))
        self.failures += 1
        self.due_at = now + delay
        return delay


def describe_exit(code: int) -> str:
    """An exit code in words. A negative code is the number of the signal that ended the process."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def stop_together(children: Sequence[Child], grace: float, hurry: Callable[[], bool]) -> None:
    """Stop all children at once: send each signal in turn, wait up to `grace` seconds, then send SIGKILL."""
    alive = [child for child in children if child.running is not None and child.running.poll() is None]
    for turn in range(max((len(child.stop_signals) for child in alive), default=0)):
        for child in alive:
            if child.running is not None and turn < len(child.stop_signals):
                child.running.send_signal(child.stop_signals[turn])
        deadline = time.monotonic() + grace
        while alive and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
            alive = [child for child in alive if child.running is not None and child.running.poll() is None]
    for child in children:
        if child.running is not None:
            processes.kill_session(child.running.pid)
            # A fork that has no session of its own yet.
            child.running.kill()
            child.running.wait()
            child.running = None


def embedded_child(name: str, server: EmbeddedServer, log: LogFile) -> Child:
    """An embedded server as a supervised child. Call `server.open` first; `server.stop` stops it."""

    def start(output: int) -> subprocess.Popen[bytes]:
        server.output = output
        return server.spawn()

    return Child(name=name, start=start, log=log, stop_signals=(server.stop_signal,), recover=server.recover)


def worker_arguments(name: str, queues: Sequence[str]) -> list[str]:
    """Arguments of a Celery worker of some queues. See MIN_CONCURRENCY for the choice of its pool."""
    concurrency = max(MIN_CONCURRENCY, min(MAX_CONCURRENCY, os.cpu_count() or 1))
    return [
        *("celery", "--app", "fp8scope_dashboard.celery:app", "--quiet", "worker", "--loglevel", "INFO"),
        *("--hostname", f"{name}@%h", "--queues", ",".join(queues)),
        *("--pool", "prefork", "--concurrency", str(concurrency)),
        *("--max-memory-per-child", str(CHILD_MEMORY)),
        # Both are for messages between workers, which these do not need.
        *("--without-gossip", "--without-mingle"),
    ]


def beat_arguments(schedule: Path) -> list[str]:
    """Arguments of Celery's scheduler. It stores in `schedule` when it last sent each task."""
    return [
        *("celery", "--app", "fp8scope_dashboard.celery:app", "--quiet", "beat", "--loglevel", "WARNING"),
        *("--schedule", str(schedule)),
    ]
