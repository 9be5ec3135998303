"""Let the requests of each project take turns, so that a busy project does not delay the others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fp8scope_dashboard.admission import limits
from fp8scope_dashboard.wire.errors import SlowDownError


class TurnsFullError(SlowDownError):
    """Too many requests of a project wait."""

    def __init__(self) -> None:
        super().__init__(
            "Too many requests of this project wait for an answer.",
            "Wait for the seconds in Retry-After, then send again.",
        )


class Turns:
    """Bounds the requests of a project that run at a time, while other projects send too.

    All threads share one interpreter: a request of a project that sends little waits for it behind every
    request that runs. A project alone is not bounded. Use it from one event loop.

    Args:
        running: requests of a project that run at a time while others send.
        waiting: requests of a project that wait for their turn.
        seconds: for how long after a project's last request it counts as sending.
    """

    def __init__(
        self,
        running: int = limits.CONTENDED_REQUESTS,
        waiting: int = limits.CONTENDED_WAITING,
        seconds: float = limits.CONTENTION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_running = running
        self._most_waiting = waiting
        self._seconds = seconds
        self._clock = clock
        self._running: Counter[int] = Counter()
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}
        # When each project sent last, the oldest first.
        self._seen: OrderedDict[int, float] = OrderedDict()

    @asynccontextmanager
    async def turn(self, project: int | None) -> AsyncIterator[None]:
        """Wait for the project's turn; None, for people who read pages, is not bounded.

        Raises:
            TurnsFullError: too many of its requests wait.
        """
        if project is None:
            yield
            return
        self._note(project)
        await self._begin(project)
        try:
            yield
        finally:
            self._end(project)

    def _note(self, project: int) -> None:
        now = self._clock()
        self._seen[project] = now
        self._seen.move_to_end(project)
        while next(iter(self._seen.values())) < now - self._seconds:
            self._seen.popitem(last=False)

    def _may_run(self, project: int) -> bool:
        return len(self._seen) < 2 or self._running[project] < self._most_running

    async def _begin(self, project: int) -> None:
        queue = self._waiting.get(project)
        if not queue and self._may_run(project):
            self._running[project] += 1
            return
        if queue is None:
            queue = self._waiting[project] = deque()
        if len(queue) >= self._most_waiting:
            raise TurnsFullError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was given the turn in the moment in which its client left.
                self._end(project)
            raise

    def _end(self, project: int) -> None:
        self._running[project] -= 1
        queue = self._waiting.get(project, deque())
        while queue and self._may_run(project):
            turn = queue.popleft()
            if not turn.cancelled():
                self._running[project] += 1
                turn.set_result(None)
        if not queue:
            self._waiting.pop(project, None)
        if not self._running[project]:
            del self._running[project]
