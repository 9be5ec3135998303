"""A training process of the demo and the messages that it prints on standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from fp8scope_dashboard.demo.plan import RunPlan
from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.process_setup import give_way

MODULE = "fp8scope.demo.train"
STOP_SECONDS = 5.0
NICENESS = 5
TAIL_LINES = 20
LONGEST_LINE = 1_000_000


@dataclass(kw_only=True)
class TrainerReport:
    """The state of a training process according to its messages. Times are seconds since 1970."""

    run: str = ""
    step: int = 0
    loss: float | None = None
    tokens_per_second: float = 0.0
    evaluated: int = 0
    alerts: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[str, Any] | None = None

    @property
    def step_times(self) -> list[float]:
        """The end time of each step, in order; empty until the run has finished."""
        return list((self.finished or {}).get("step_times", []))

    def update(self, message: Mapping[str, Any]) -> None:
        """Apply a message of `fp8scope.demo.train`."""
        match message.get("event"):
            case "started":
                self.run = str(message["run"])
            case "progress":
                self.step = int(message["step"])
                self.loss = message["loss"]
                self.tokens_per_second = float(message["tokens_per_second"] or 0.0)
            case "evaluated":
                self.evaluated += 1
            case "alert":
                self.alerts.append(dict(message))
            case "finished":
                self.finished = dict(message)


class TrainingProcess:
    """One training process. Start it from a thread that lives at least as long as the process."""

    def __init__(self, plan: RunPlan, environment: Mapping[str, str], logs: Path) -> None:
        self.plan = plan
        self.log = logs / f"{plan.name.replace(' ', '-')}.log"
        self._environment = environment
        self._lock = Lock()
        self._report = TrainerReport()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: Thread | None = None

    def start(self, module: str = MODULE) -> None:
        """Start the process and a thread that reads its output."""
        read_fd, write_fd = os.pipe()
        try:
            self._child = processes.spawn(
                [sys.executable, "-m", module, *self.plan.arguments()],
                death_signal=signal.SIGTERM,
                output=write_fd,
                environment=self._environment,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        # The servers, through which alerts come, share the processors with the trainings.
        give_way(NICENESS, self._child.pid)
        self._reader = Thread(target=self._read, args=(read_fd,), name=self.plan.name, daemon=True)
        self._reader.start()

    @property
    def report(self) -> TrainerReport:
        """A copy of the current report."""
        with self._lock:
            return TrainerReport(**{**vars(self._report), "alerts": list(self._report.alerts)})

    @property
    def started(self) -> bool:
        return self._child is not None

    def exit_status(self) -> int | None:
        """The exit status; None until the process has ended and all its output is read."""
        if self._child is None or self._reader is None or self._child.poll() is None:
            return None
        self._reader.join(STOP_SECONDS)
        return self._child.returncode

    def tail(self) -> str:
        """The last lines that are not messages, which contain a traceback if there is one."""
        with self._lock:
            return "\n".join(self._tail)

    def stop(self) -> None:
        """Stop the process if it is running."""
        if self._child is not None:
            processes.stop(self._child, signal.SIGTERM, STOP_SECONDS)

    def _read(self, read_fd: int) -> None:
        with open(read_fd, "rb") as pipe, self.log.open("ab") as log:
            while line := pipe.readline(LONGEST_LINE):
                self._handle_line(line, log)

    def _handle_line(self, line: bytes, log: Any) -> None:
        text = line.decode(errors="replace").rstrip()
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        with self._lock:
            if isinstance(message, dict) and "event" in message:
                self._report.update(message)
                return
            self._tail.append(text)
        log.write(line)
        log.flush()
