"""A training process of the demo, and what it tells about itself on its standard output."""

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

MODULE = "fp8scope.demo.train"
STOP_SECONDS = 5.0
TAIL_LINES = 20
LONGEST_LINE = 1_000_000


@dataclass
class Told:
    """What a training process has told so far. Times are seconds since 1970."""

    run: str = ""
    step: int = 0
    loss: float | None = None
    tokens_per_second: float = 0.0
    evaluated: int = 0
    alerts: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[str, Any] | None = None

    @property
    def step_times(self) -> list[float]:
        """When each step ended, the first step first; empty before the run has finished."""
        return list((self.finished or {}).get("step_times", []))

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take in one message of `fp8scope.demo.train`."""
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


class Trainer:
    """One training process. Start it from a thread that lives as long as it should."""

    def __init__(self, plan: RunPlan, environment: Mapping[str, str], logs: Path) -> None:
        self.plan = plan
        self.log = logs / f"{plan.name.replace(' ', '-')}.log"
        self._environment = environment
        self._lock = Lock()
        self._told = Told()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: Thread | None = None

    def start(self, module: str = MODULE) -> None:
        """Start the process and a thread that reads what it says."""
        reading, writing = os.pipe()
        try:
            self._child = processes.spawn(
                [sys.executable, "-m", module, *self.plan.arguments()],
                death_signal=signal.SIGTERM,
                output=writing,
                environment=self._environment,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._reader = Thread(target=self._read, args=(reading,), name=self.plan.name, daemon=True)
        self._reader.start()

    @property
    def told(self) -> Told:
        """A copy of what is known."""
        with self._lock:
            return Told(**{**vars(self._told), "alerts": list(self._told.alerts)})

    @property
    def started(self) -> bool:
        return self._child is not None

    def exit_status(self) -> int | None:
        """None before the process has ended and everything it said was read."""
        if self._child is None or self._reader is None or self._child.poll() is None:
            return None
        self._reader.join(STOP_SECONDS)
        return self._child.returncode

    def tail(self) -> str:
        """The last lines that were not messages: where a traceback is."""
        with self._lock:
            return "\n".join(self._tail)

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._child is not None:
            processes.stop(self._child, signal.SIGTERM, STOP_SECONDS)

    def _read(self, reading: int) -> None:
        with open(reading, "rb") as pipe, self.log.open("ab") as log:
            while line := pipe.readline(LONGEST_LINE):
                self._take(line, log)

    def _take(self, line: bytes, log: Any) -> None:
        text = line.decode(errors="replace").rstrip()
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        with self._lock:
            if isinstance(message, dict) and "event" in message:
                self._told.hear(message)
                return
            self._tail.append(text)
        log.write(line)
        log.flush()
