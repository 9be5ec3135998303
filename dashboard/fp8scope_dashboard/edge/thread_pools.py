"""The threads that answer requests. Unauthenticated clients have a few of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from django.conf import settings

from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.turns import Turns
from fp8scope_dashboard.process_setup import give_way_in_thread
from fp8scope_dashboard.wire.errors import UnavailableError

Result = TypeVar("Result")

KNOWN: Final = "known"
BATCHES: Final = "batches"
VISITORS: Final = "visitors"
PASSWORDS: Final = "passwords"

THREADS: Final = 256
"""Requests of known callers that run at a time; more wait. On a busy server most wait for a connection."""


BATCH_THREADS: Final = 6
"""Batches that are stored at a time; each of these threads keeps a connection to the database."""


NICENESS_OF_PASSWORDS: Final = 15


class PoolFullError(UnavailableError):
    """The queue of a pool is full."""

    retry_after = limits.BUSY_SECONDS

    def __init__(self) -> None:
        super().__init__("The server is busy with other requests.", "Wait a second, then try again.")


class ThreadPool:
    """A thread pool with a bounded queue. Use it from one event loop.

    Args:
        waiting: requests that may wait for a thread; None for any number.
        niceness: of its threads. Those of this process with less niceness get the processors first.
    """

    def __init__(self, name: str, threads: int, waiting: int | None, niceness: int = 0) -> None:
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=give_way_in_thread, initargs=(niceness,)
        )
        self._most = None if waiting is None else threads + waiting
        self._inside = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in one of the threads, in a copy of the current context.

        Raises:
            PoolFullError: if the queue is full. `work` is not called.
        """
        if self._most is not None and self._inside >= self._most:
            raise PoolFullError
        self._inside += 1
        try:
            inside = partial(copy_context().run, work)
            return await asyncio.get_running_loop().run_in_executor(self._threads, inside)
        finally:
            self._inside -= 1


def _pools() -> dict[str, ThreadPool]:
    pool = settings.DATABASES["default"].get("OPTIONS", {}).get("pool") or {}
    # Each thread may hold a database connection, and all threads share the interpreter: most of both is left
    # to known callers.
    connections = int(pool.get("max_size", 16))
    few = max(1, min(2, connections // 8))
    hashing = min(few, max(1, (os.cpu_count() or 1) // 2))
    return {
        KNOWN: ThreadPool("request", THREADS, None),
        BATCHES: ThreadPool("batch", max(1, min(BATCH_THREADS, connections // 2)), None),
        VISITORS: ThreadPool("visitor", few, 64),
        # Hashing a password takes a processor for a third of a second, without the interpreter.
        # On few processors one at a time: all of them are then never busy with hashes.
        PASSWORDS: ThreadPool("password", hashing, 8, niceness=NICENESS_OF_PASSWORDS),
    }


@dataclass(frozen=True)
class ThreadPools:
    """The pools of one web process, by name.

    `KNOWN` is for authenticated callers, `BATCHES` for their batches of the usual size. `VISITORS` is for
    unauthenticated clients that read pages and for checking unknown tokens, `PASSWORDS` for their forms:
    passwords are hashed there.
    """

    _by_name: dict[str, ThreadPool] = field(default_factory=_pools)
    turns: Turns = field(default_factory=Turns)

    def __getitem__(self, name: str) -> ThreadPool:
        return self._by_name[name]
