"""A child that is started again when it dies, and how the installation's own three are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8scope_dashboard.servers import process
from fp8scope_dashboard.servers.embedded_base import EmbeddedServer
from fp8scope_dashboard.servers.logs import LogFile

FIRST_DELAY = 0.25
LONGEST_DELAY = 30.0
# A child that lived this long was well: its next failure counts as the first.
HEALTHY_SECONDS = 60.0
# Prefork: the only pool in which Celery's time limits work, where a crash in a native codec costs one task
# and not the worker, and where a long analysis does not hold the interpreter lock that an alert waits for. At
# least four, because tasks also wait for other people's webhooks; a child shares most of its memory.
LEAST_CONCURRENCY = 4
MOST_CONCURRENCY = 16
# A child that grew beyond this (in KiB) is replaced after its task.
CHILD_MEMORY = 1_000_000

Start = Callable[[int], "subprocess.Popen[bytes]"]


@dataclass
class Child:
    """One supervised process.

    Args:
        name: names it on the terminal, in `pids()` and in its log file's name.
        start: starts it with stdout and stderr going to the given file descriptor.
        log: where these go.
        stop_signals: sent one after the other, each with the supervisor's grace, before SIGKILL.
    """

    name: str
    start: Start
    log: LogFile
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    running: subprocess.Popen[bytes] | None = None
    failures: int = 0
    started_at: float = 0.0
    due_at: float = 0.0

    def launch(self) -> None:
        """Start it now."""
        output = self.log.pipe()
        try:
            self.running = self.start(output)
        finally:
            os.close(output)
        self.started_at = time.monotonic()

    def look_after(self) -> str | None:
        """Notice a death, and start it again once that is due. Returns what happened, if anything did."""
        if self.running is not None:
            if (code := self.running.poll()) is None:
                return None
            process.kill_session(self.running.pid)
            self.running = None
            return f"{self.name} {describe(code)}; starting it again in {self._postpone():g} s"
        if time.monotonic() < self.due_at:
            return None
        try:
            self.launch()
        except (OSError, process.ServerError) as error:
            return f"{self.name} could not be started: {error}; trying again in {self._postpone():g} s"
        assert self.running is not None
        return f"{self.name} started again as process {self.running.pid}"

    def _postpone(self) -> float:
        now = time.monotonic()
        self.failures = 0 if now - self.started_at > HEALTHY_SECONDS else self.failures
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.failures, 10))
        self.failures += 1
        self.due_at = now + delay
        return delay


def describe(code: int) -> str:
    """An exit code in words: a negative one is the signal that ended the process."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def stop_together(children: Sequence[Child], grace: float, hurry: Callable[[], bool]) -> None:
    """Stop all of them at once: each signal in turn, up to `grace` seconds after each, then SIGKILL."""
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
            process.kill_session(child.running.pid)
            child.running.wait()
            child.running = None


def embedded(name: str, server: EmbeddedServer, log: LogFile) -> Child:
    """An embedded server as a supervised child. It must have been opened; it is stopped by its own `stop`."""

    def start(output: int) -> subprocess.Popen[bytes]:
        server.output = output
        return server.spawn()

    return Child(name, start, log, (server.stop_signal,))


def python(
    name: str,
    arguments: Sequence[str],
    log: LogFile,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
    inherit: Sequence[int] = (),
) -> Child:
    """A child of this same interpreter: `python -m <arguments>`."""

    def start(output: int) -> subprocess.Popen[bytes]:
        return process.spawn(
            [sys.executable, "-m", *arguments],
            # The last of the signals is the one that does not wait for work in progress.
            death_signal=stop_signals[-1],
            output=output,
            cwd=cwd,
            environment=environment,
            inherit=inherit,
        )

    return Child(name, start, log, stop_signals)


def worker_arguments() -> list[str]:
    """Celery's worker. See LEAST_CONCURRENCY for the choice of its pool."""
    concurrency = max(LEAST_CONCURRENCY, min(MOST_CONCURRENCY, os.cpu_count() or 1))
    return [
        *("celery", "--app", "fp8scope_dashboard.celery:app", "--quiet", "worker", "--loglevel", "INFO"),
        *(
            "--pool",
            "prefork",
            "--concurrency",
            str(concurrency),
            "--max-memory-per-child",
            str(CHILD_MEMORY),
        ),
        # Talk between workers: there is one.
        *("--without-gossip", "--without-mingle"),
    ]


def beat_arguments(schedule: Path) -> list[str]:
    """Celery's clock, which remembers in `schedule` when it last sent what."""
    return [
        *("celery", "--app", "fp8scope_dashboard.celery:app", "--quiet", "beat", "--loglevel", "WARNING"),
        *("--schedule", str(schedule)),
    ]
