"""Workers that deliver and kill themselves (SIGKILL) at a given moment of their work.

    python crashing_delivery.py

Reads lines with a JSON object: deliveries with a moment each. Forks a child for each delivery, a few at a
time, that delivers and dies at that moment. Moments are counted before and after each SQL statement, each
commit, each connection and each piece of data that is sent or received over it. Answers each line with an
object: deliveries with `killed`, or `done` and the moments that delivering has if the child survived.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator

import django
import psycopg
from dashboard.helpers.crashing import Countdown

CHILDREN_AT_ONCE = 4


def deliver(delivery: int, moments: int) -> int:
    """Deliver once, as a worker does. Returns how many moments that has."""
    countdown = Countdown(moments)
    cursor, connection = psycopg.Cursor, psycopg.Connection
    cursor.execute = countdown.around(cursor.execute)  # type: ignore[method-assign]
    connection.commit = countdown.around(connection.commit)  # type: ignore[method-assign]
    for name in ("connect", "sendall", "recv_into"):
        setattr(socket.socket, name, countdown.around(getattr(socket.socket, name)))
    from fp8scope_dashboard.alerts.tasks import deliver as task

    task(delivery)
    return moments - countdown.moments


def outcomes(orders: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Carry out each (delivery, moment) in a child; yields each delivery with what became of its child."""
    children: dict[int, str] = {}
    for delivery, moment in orders:
        child = os.fork()
        if not child:
            os._exit(deliver(int(delivery), moment))
        children[child] = delivery
        if len(children) == CHILDREN_AT_ONCE:
            yield _ended(children)
    while children:
        yield _ended(children)


def _ended(children: dict[int, str]) -> tuple[str, str]:
    child, status = os.wait()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return children.pop(child), "killed" if killed else f"done {os.waitstatus_to_exitcode(status)}"


def main() -> None:
    django.setup()
    # Imported here so that not every child imports them; the second is for the addresses in messages.
    import fp8scope_dashboard.alerts.tasks
    import fp8scope_dashboard.urls  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(dict(outcomes(json.loads(line).items()))), flush=True)


if __name__ == "__main__":
    main()
