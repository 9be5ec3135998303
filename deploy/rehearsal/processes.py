"""Processes of the rehearsal, which are started again when they end, as systemd does."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from network import Network

# RestartSec of the units in deploy/systemd.
RESTART_SECONDS = 5.0
STOP_SECONDS = 60.0


class Process:
    """A program on a machine. While `start` was called last, a keeper starts it again when it ends."""

    def __init__(
        self,
        network: Network,
        machine: str,
        command: list[str],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        account = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        self._command = network.inside(machine, [*account, *command])
        self._log = log
        self.environment = {"PATH": os.environ["PATH"], **(environment or {})}
        self._child: subprocess.Popen[bytes] | None = None
        self._is_wanted = False
        self._ended_at = 0.0
        self.restarts = 0

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        self._is_wanted = True
        self._spawn()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the process as systemd does: a signal, and SIGKILL to its group if it takes too long."""
        self._is_wanted = False
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_SECONDS)
        self._kill_group()

    def kill(self) -> None:
        """SIGKILL the process and its children, and leave it dead."""
        self._is_wanted = False
        self._kill_group()

    def signal(self, number: signal.Signals) -> None:
        assert self._child is not None
        self._child.send_signal(number)

    def watch(self) -> None:
        """Start the process again if it has ended and should run."""
        if not self._is_wanted or self._child is None or self._child.poll() is None:
            self._ended_at = 0.0
        elif not self._ended_at:
            self._ended_at = time.monotonic()
        elif time.monotonic() - self._ended_at >= RESTART_SECONDS:
            self._kill_group()
            self.restarts += 1
            self._spawn()

    def _spawn(self) -> None:
        with self._log.open("ab") as output:
            self._child = subprocess.Popen(
                self._command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._log.parent,
                start_new_session=True,
            )
        self._ended_at = 0.0

    def _kill_group(self) -> None:
        if self._child is None:
            return
        # The group outlives its leader when that was killed: the children of a Celery worker, or
        # PostgreSQL's.
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


class Keeper:
    """A thread that watches processes."""

    def __init__(self) -> None:
        self._processes: list[Process] = []
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="keeper", daemon=True).start()

    def add(self, process: Process) -> Process:
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill everything, the last first."""
        self._stop.set()
        for process in reversed(self._processes):
            process.kill()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            for process in tuple(self._processes):
                process.watch()
