"""A worker that delivers and kills itself (SIGKILL) at a given moment of its work.

    python crashing_delivery.py DELIVERY

Reads one number per line. For each number, it forks a child that delivers and dies at the moment of that
number. Moments are counted before and after each SQL statement, each commit, each connection and each piece
of data that is sent or received over it. Prints `killed`, or `done` and its status if the child survived.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import django
import psycopg
from dashboard.helpers.crashing import Countdown


def deliver(delivery: int, moments: int) -> None:
    """Deliver once, as a worker does."""
    countdown = Countdown(moments)
    cursor, connection = psycopg.Cursor, psycopg.Connection
    cursor.execute = countdown.around(cursor.execute)  # type: ignore[method-assign]
    connection.commit = countdown.around(connection.commit)  # type: ignore[method-assign]
    for name in ("connect", "sendall", "recv_into"):
        setattr(socket.socket, name, countdown.around(getattr(socket.socket, name)))
    from fp8scope_dashboard.alerts.tasks import deliver as task

    task(delivery)


def main() -> None:
    django.setup()
    # Imported here so that not every child imports it.
    import fp8scope_dashboard.alerts.tasks  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            deliver(int(sys.argv[1]), int(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("killed" if killed else f"done {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
