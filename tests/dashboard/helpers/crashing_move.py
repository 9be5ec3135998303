"""A process that moves a run into the cold store and kills itself (SIGKILL) at a given moment.

    python crashing_move.py RUN

Reads one number per line. For each number, it forks a child that moves bodies into one file and dies at the
moment of that number. Moments are counted before and after each SQL statement and each commit, and before and
after the file is written and gets its name. Prints `killed`, or `done` if the child survived.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import UUID

import django
import psycopg
from dashboard.helpers.crashing import Countdown


def move(run: UUID, moments: int) -> None:
    countdown = Countdown(moments)
    from fp8scope_dashboard.cold_store.object_store import ObjectStore
    from fp8scope_dashboard.telemetry.cold import moving

    cursor = psycopg.Cursor
    cursor.execute = countdown.around(cursor.execute)  # type: ignore[method-assign]
    cursor.stream = countdown.around_stream(cursor.stream)  # type: ignore[method-assign]
    psycopg.Connection.commit = countdown.around(psycopg.Connection.commit)  # type: ignore[method-assign]
    ObjectStore._write = countdown.around(ObjectStore._write)  # type: ignore[method-assign]
    Path.replace = countdown.around(Path.replace)  # type: ignore[method-assign]
    moving._move_file(run)


def main() -> None:
    django.setup()
    run = UUID(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            move(run, int(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("killed" if killed else f"done {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
