"""The supervisor's side of `fork_server.py`: starting processes as its forks, and their exit statuses."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8scope_dashboard.embedded import processes
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers.children import Child, LogFile
from fp8scope_dashboard.servers.fork_server import MAX_MESSAGE, ForkRequest

ANSWER_SECONDS = 60.0
"""An answer to a request waits at most for one import."""


class Forked:
    """A process of the fork server, with the methods of `subprocess.Popen` that the supervisor uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit status, negative for a signal's number; None while the process runs."""
        self._server.read_answers()
        return self.returncode

    def wait(self) -> int:
        """Wait for the exit status."""
        while self.returncode is None:
            self._server.read_answers(wait=True)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts the fork server, and processes as its forks. For one thread, which lives as long as they do.

    Attributes:
        child: the fork server itself, which the supervisor launches, restarts and stops.
    """

    def __init__(self, log: LogFile, cwd: Path, environment: Mapping[str, str]) -> None:
        self.child = Child(name="fork_server", start=self._start, log=log)
        self._cwd = cwd
        self._environment = environment
        self._control: socket.socket | None = None
        self._is_ready = False
        self._forks: dict[int, Forked] = {}

    def is_ready(self) -> bool:
        """Return whether it has imported everything and forks at once."""
        self.read_answers()
        return self._is_ready

    def python_child(
        self,
        name: str,
        arguments: Sequence[str],
        log: LogFile,
        *,
        stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        inherit: Sequence[int] = (),
    ) -> Child:
        """A child that runs `python -m <arguments>`; `fd:n` among them stands for the n-th of `inherit`."""
        # The last signal is the one that does not wait for work in progress.
        request = ForkRequest(name, tuple(arguments), int(stop_signals[-1]))

        def start(output: int) -> Forked:
            return self._fork(request, (output, *inherit))

        return Child(name=name, start=start, log=log, stop_signals=stop_signals, may_start=self.is_ready)

    def read_answers(self, *, wait: bool = False) -> None:
        """Read the answers that have come; with `wait` at least one.

        Raises:
            ServerError: none came in ANSWER_SECONDS.
        """
        while self._control is not None:
            if (answer := self._receive(self._control, wait)) is None:
                return
            wait = False
            self._note(answer)

    def close(self) -> None:
        """Close the socket, which ends the fork server. Its processes are taken for killed."""
        if self._control is not None:
            self._control.close()
        self._control, self._is_ready = None, False
        for fork in self._forks.values():
            # The fork server's end sends them their last signal.
            fork.returncode = -signal.SIGKILL
        self._forks.clear()

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            return processes.spawn(
                [sys.executable, "-m", "fp8scope_dashboard.servers.fork_server", str(number)],
                death_signal=signal.SIGTERM,
                output=output,
                cwd=self._cwd,
                environment=self._environment,
                inherit=[number],
            )

    def _fork(self, request: ForkRequest, descriptors: Sequence[int]) -> Forked:
        if self._control is None:
            raise ServerError("the fork server has ended")
        try:
            socket.send_fds(self._control, [request.encode()], descriptors)
            while True:
                answer = self._receive(self._control, wait=True)
                if answer is None or self._control is None:
                    raise ServerError("the fork server has ended")
                self._note(answer)
                if "pid" in answer:
                    return self._forks[answer["pid"]]
        except OSError as error:
            raise ServerError(f"the fork server does not answer: {error}") from error

    def _receive(self, control: socket.socket, wait: bool) -> dict[str, Any] | None:
        """The next answer; None if none has come, or if the fork server has ended."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        if not poll.poll(1000 * ANSWER_SECONDS if wait else 0):
            if wait:
                raise ServerError(f"the fork server did not answer in {ANSWER_SECONDS:.0f} s")
            return None
        try:
            message = control.recv(MAX_MESSAGE)
        except ConnectionError:
            message = b""
        if not message:
            self.close()
            return None
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, answer: Mapping[str, Any]) -> None:
        if "pid" in answer:
            self._forks[answer["pid"]] = Forked(self, answer["pid"])
        elif "ended" in answer:
            self._forks.pop(answer["ended"]).returncode = answer["code"]
        else:
            self._is_ready = True
