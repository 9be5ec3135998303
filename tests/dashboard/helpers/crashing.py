"""A process that compacts a run and kills itself (SIGKILL) at a given moment of the work in the database.

    python crashing.py RUN

Reads one number per line. For each number, it forks a child that makes one change to the run and dies at the
moment of that number. Moments are counted before and after each SQL statement; -1 is the moment before the
commit and -2 the moment after it. Prints `killed`, or `done` and the number of changes if the child survived.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from uuid import UUID

import django
import psycopg


class Countdown:
    """Kills this process when its count reaches 0."""

    def __init__(self, moments: int) -> None:
        self.moments = moments

    def tick(self) -> None:
        self.moments -= 1
        if not self.moments:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function with a moment before and after each call."""

        @wraps(function)
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.tick()
            result = function(*arguments, **keywords)
            self.tick()
            return result

        return counted

    def around_stream(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a generator function with a moment before and after the iteration."""

        @wraps(function)
        def counted(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            self.tick()
            yield from function(*arguments, **keywords)
            self.tick()

        return counted


def compact(run: UUID, moments: int) -> int:
    """Make one change; returns how many were made."""
    countdown = Countdown(moments)
    commits = Countdown(-moments)
    cursor, connection = psycopg.Cursor, psycopg.Connection
    cursor.execute = countdown.around(cursor.execute)  # type: ignore[method-assign]
    cursor.executemany = countdown.around(cursor.executemany)  # type: ignore[method-assign]
    cursor.stream = countdown.around_stream(cursor.stream)  # type: ignore[method-assign]
    connection.commit = commits.around(connection.commit)  # type: ignore[method-assign]
    from fp8scope_dashboard.telemetry import compaction
    from fp8scope_dashboard.telemetry.rollups import schedule

    compaction.ENOUGH_CHUNKS = 4
    compaction.FULL_ROWS = 100
    schedule.MIN_STEPS = schedule.SHORT_RUN = 64
    return compaction.compact_run(run, 1)


def main() -> None:
    django.setup()
    # Imported here so that not every child imports it.
    import fp8scope_dashboard.telemetry.compaction  # noqa: F401

    run = UUID(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(compact(run, int(line)))
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("killed" if killed else f"done {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
