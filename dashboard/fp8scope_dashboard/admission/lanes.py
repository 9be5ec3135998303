"""The threads that answer requests. Strangers have a few, and never those of agents and signed-in people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from django.conf import settings

from fp8scope_dashboard.admission import limits
from fp8scope_dashboard.wire.errors import UnavailableError

Result = TypeVar("Result")

KNOWN: Final = "known"
VISITORS: Final = "visitors"
PASSWORDS: Final = "passwords"

THREADS: Final = 256
"""Requests of known callers at work at a time; more wait. Most of a busy server's wait for a connection."""


class LaneFullError(UnavailableError):
    """As many requests wait as may wait."""

    retry_after = limits.BUSY_SECONDS

    def __init__(self) -> None:
        super().__init__("The server is busy with other requests.", "Wait a second, then try again.")


class Lane:
    """Some threads, and a bounded number of requests that wait for one. Used from one event loop.

    Args:
        waiting: requests that may wait; None: any number.
    """

    def __init__(self, name: str, threads: int, waiting: int | None) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = None if waiting is None else threads + waiting
        self._inside = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Have `work` done in one of the threads, in a copy of the current context.

        Raises:
            LaneFullError: too many wait already. `work` was not called.
        """
        if self._most is not None and self._inside >= self._most:
            raise LaneFullError
        self._inside += 1
        try:
            inside = partial(copy_context().run, work)
            return await asyncio.get_running_loop().run_in_executor(self._threads, inside)
        finally:
            self._inside -= 1


def _lanes() -> dict[str, Lane]:
    pool = settings.DATABASES["default"].get("OPTIONS", {}).get("pool") or {}
    # Each thread may hold a database connection: most are left to known callers. And all threads share the
    # interpreter: what strangers get of it is what the others lack.
    few = max(1, min(2, int(pool.get("max_size", 16)) // 8))
    return {
        KNOWN: Lane("request", THREADS, None),
        VISITORS: Lane("visitor", few, 64),
        PASSWORDS: Lane("password", few, 8),
    }


@dataclass(frozen=True)
class Lanes:
    """The lanes of a web process, by name.

    `KNOWN` is for callers that have shown who they are, `VISITORS` for strangers that read pages and for the
    check of unknown tokens, `PASSWORDS` for forms that strangers send: passwords are hashed there.
    """

    _by_name: dict[str, Lane] = field(default_factory=_lanes)

    def __getitem__(self, name: str) -> Lane:
        return self._by_name[name]
