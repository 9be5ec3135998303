"""A process that has imported the code of the server, and forks into its Python processes.

    python -m fp8scope_dashboard.servers.fork_server FD

Web server, workers and beat import the same modules: 2.3 s of processor time and 100 MB each. Here they are
imported once, and their memory is shared. It has no threads and no connections, so that a fork is safe.

The supervisor sends a request for each process over the Unix socket FD (SOCK_SEQPACKET), with the file
descriptors that the process gets. The answers tell the process's number, and later its exit status. The
processes get a signal when this one ends, and this one ends with the supervisor (`exec_with_death_signal`).
`forks.py` is the supervisor's side.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import selectors
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Final

from fp8scope_dashboard.embedded.exec_with_death_signal import die_with_parent
from fp8scope_dashboard.process_setup import kill_after_parent_exit

READY: Final = b'{"ready": true}'
MAX_MESSAGE: Final = 1 << 16
MAX_DESCRIPTORS: Final = 8
PR_SET_NAME: Final = 15
LONGEST_NAME: Final = 15


@dataclass(frozen=True)
class ForkRequest:
    """One process to fork.

    Attributes:
        name: shown by `ps` and `top`, which cannot tell the processes by their command.
        arguments: those of `python -m`. In the n-th inherited descriptor's place stands `fd:n`.
        death_signal: sent to the process when the fork server ends.
    """

    name: str
    arguments: tuple[str, ...]
    death_signal: int

    def encode(self) -> bytes:
        """The request as a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> ForkRequest:
        """The request in a message of `encode`."""
        fields = json.loads(message)
        return cls(fields["name"], tuple(fields["arguments"]), fields["death_signal"])


@dataclass(frozen=True)
class Fork:
    """The description of a new process: a request, and its descriptors, the first of which is its output."""

    request: ForkRequest
    descriptors: tuple[int, ...]

    def become(self, parent: int) -> None:
        """Leave the parent's session, take the output, and run the module until it ends."""
        os.setsid()
        die_with_parent(parent, self.request.death_signal)
        output, *inherited = self.descriptors
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        _set_name(f"fp8scope {self.request.name}")
        numbers = {f"fd:{index}": str(number) for index, number in enumerate(inherited)}
        sys.argv = [numbers.get(argument, argument) for argument in self.request.arguments]
        kill_after_parent_exit(parent)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main(descriptor: int) -> None:
    """Import everything, then serve the supervisor; returns when it has closed the socket."""
    # Imported here, because the supervisor imports this module without Django.
    from fp8scope_dashboard import preload

    preload.import_views()
    for name in ("fp8scope_dashboard.celery", "celery.bin.celery", "uvicorn"):
        importlib.import_module(name)
    preload.freeze()
    parent = os.getpid()
    with socket.socket(fileno=descriptor) as control:
        control.send(READY)
        fork = serve(control, list(preload.LAZILY_IMPORTED))
    if fork is not None:
        fork.become(parent)


def serve(control: socket.socket, later: list[str]) -> Fork | None:
    """Answer requests until the supervisor closes the socket, and import `later` while there are none.

    Returns in each forked process what it is to become, and None in the parent at its end.
    """
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            events = selector.select(0 if later else None)
            if not events:
                importlib.import_module(later.pop(0))
            for key, _ in events:
                if key.fileobj is not control:
                    selector.unregister(key.fileobj)
                    _report_end(control, children.pop(key.fd), key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_DESCRIPTORS)
                if not message:
                    return None
                if (pid := os.fork()) == 0:
                    for handle in children:
                        os.close(handle)
                    return Fork(ForkRequest.decode(message), tuple(descriptors))
                for number in descriptors:
                    os.close(number)
                handle = os.pidfd_open(pid)
                children[handle] = pid
                selector.register(handle, selectors.EVENT_READ)
                control.send(json.dumps({"pid": pid}).encode())


def _report_end(control: socket.socket, pid: int, handle: int) -> None:
    os.close(handle)
    _, status = os.waitpid(pid, 0)
    control.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _set_name(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:LONGEST_NAME], 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
