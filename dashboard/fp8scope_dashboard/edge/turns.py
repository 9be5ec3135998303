"""Share one web process between projects by the time that their requests take.

All threads share one interpreter: a request waits for it behind every other request that runs. What a project
takes from others is therefore the time of its requests, not their number: one that parses a large JSON
document takes as much as twenty small batches. So while several projects send, the next turn goes to the one
that has been served least, and within it to its token that has been served least (start-time fair queueing:
Goyal, Vin and Cheng, 1996). Who sends little hardly waits; who sends more than its share waits for itself.

Each request also takes time of PostgreSQL and of the detectors, on processors that a process cannot see. So
while several projects send, one of them may use at most a share of the interpreter, even if nobody else
wants it at the moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.callers import Caller
from fp8scope_dashboard.wire.errors import SlowDownError

Result = TypeVar("Result")

FIRST_COST: Final = 0.002
"""Seconds that a project's first request is expected to take."""
OUTSIDE_COST: Final = 0.001
"""Seconds that each request takes outside of its thread: of the event loop and of PostgreSQL."""
MIN_REST: Final = 0.001
"""Seconds after which a project that has no credit is looked at again at the earliest."""
LEARNING: Final = 0.2
"""Weight of the last request in the expected cost of the next."""


class TurnsFullError(SlowDownError):
    """Too many requests of a project wait."""

    def __init__(self) -> None:
        super().__init__(
            "Too many requests of this project wait for an answer.",
            "Wait for the seconds in Retry-After, then send again.",
        )


@dataclass
class Turn:
    """One request that has its turn. `seconds`: processor time of its thread."""

    expected: float = 0.0
    seconds: float = 0.0

    def measured(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """`work`, which notes the processor time that its thread takes for it."""

        def measure() -> Result:
            begin = time.thread_time()
            try:
                return work()
            finally:
                self.seconds = time.thread_time() - begin + OUTSIDE_COST

        return measure


@dataclass
class _TokenTurns:
    served: float = 0.0
    waiting: deque[tuple[asyncio.Future[None], Turn]] = field(default_factory=deque)


@dataclass(kw_only=True)
class _Project:
    """A project that sends.

    Attributes:
        served: the seconds of its requests, in virtual time: one that was idle starts at that of the others.
        running, busy: the requests that run, and the seconds that they are expected to take.
        cost: the seconds that its next request is expected to take.
        seen: when its last request came.
        credit, credited: the seconds that it may still use while others send, and when they were counted.
        token_time: the virtual time among its tokens.
    """

    served: float = 0.0
    running: int = 0
    busy: float = 0.0
    cost: float = FIRST_COST
    seen: float = 0.0
    credit: float = 0.0
    credited: float = 0.0
    token_time: float = 0.0
    waiting: int = 0
    tokens: dict[int, _TokenTurns] = field(default_factory=dict)


class Turns:
    """Decides which request may run. A project alone is not bounded. Use it from one event loop.

    Args:
        running: requests that run at a time while several projects send.
        of_project: those of one project.
        busy: the seconds that those of one project may be expected to take; the first runs whatever it takes.
        share: the seconds of requests that a project may use in a second while others send.
        burst: the seconds that it may use at once if it has used less before.
        waiting: requests of a project that wait for their turn.
        seconds: for how long after a project's last request it counts as sending.
    """

    def __init__(
        self,
        running: int = limits.CONTENDED_REQUESTS,
        of_project: int = limits.CONTENDED_REQUESTS_OF_PROJECT,
        busy: float = limits.CONTENDED_BUSY_SECONDS,
        share: float = limits.CONTENDED_SHARE,
        burst: float = limits.CONTENDED_BURST_SECONDS,
        waiting: int = limits.CONTENDED_WAITING,
        seconds: float = limits.CONTENTION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_running = running
        self._most_of_project = of_project
        self._most_busy = busy
        self._share = share
        self._burst = burst
        self._timer: asyncio.TimerHandle | None = None
        self._most_waiting = waiting
        self._seconds = seconds
        self._clock = clock
        self._running = 0
        self._time = 0.0
        # Those that send, with the one that has been silent for longest first.
        self._projects: OrderedDict[int, _Project] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: Caller | None) -> AsyncIterator[Turn]:
        """Wait for the turn of a request; None, for people who read pages, is not bounded.

        Raises:
            TurnsFullError: too many requests of the project wait.
        """
        turn = Turn()
        if caller is None:
            yield turn
            return
        project = self._note(caller.project)
        await self._begin(project, caller.token, turn)
        try:
            yield turn
        finally:
            self._end(project, caller.token, turn)

    def _note(self, key: int) -> _Project:
        now = self._clock()
        new = _Project(served=self._time, credit=self._burst, credited=now)
        project = self._projects.setdefault(key, new)
        project.seen = now
        self._projects.move_to_end(key)
        for silent, other in list(self._projects.items()):
            if other.seen >= now - self._seconds:
                break
            if not other.running and not other.waiting:
                del self._projects[silent]
        return project

    @property
    def _is_contended(self) -> bool:
        """Return whether several projects send.

        One whose requests all wait or run does, without a new request.
        """
        horizon = self._clock() - self._seconds
        sending = (
            project
            for project in self._projects.values()
            if project.seen >= horizon or project.running or project.waiting
        )
        return len(list(islice(sending, 2))) > 1

    def _may_run(self, project: _Project, *, contended: bool) -> bool:
        if not contended:
            return True
        if self._running >= self._most_running or self._credit(project) <= 0.0:
            return False
        return project.running == 0 or (
            project.running < self._most_of_project and project.busy + project.cost <= self._most_busy
        )

    def _credit(self, project: _Project) -> float:
        now = self._clock()
        earned = (now - project.credited) * self._share
        project.credit, project.credited = min(self._burst, project.credit + earned), now
        return project.credit

    async def _begin(self, project: _Project, token: int, turn: Turn) -> None:
        if not project.waiting and self._may_run(project, contended=self._is_contended):
            self._start(project, token, turn)
            return
        if project.waiting >= self._most_waiting:
            raise TurnsFullError
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        project.waiting += 1
        project.tokens.setdefault(token, _TokenTurns(project.token_time)).waiting.append((ready, turn))
        self._wait_for_credit()
        try:
            await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                # It was given the turn in the moment in which its client left.
                self._end(project, token, turn)
            raise

    def _start(self, project: _Project, token: int, turn: Turn) -> None:
        turn.expected = project.cost
        self._running += 1
        project.running += 1
        project.busy += turn.expected
        project.credit -= turn.expected
        self._time = project.served = max(self._time, project.served)
        project.served += turn.expected
        of_token = project.tokens.setdefault(token, _TokenTurns())
        project.token_time = of_token.served = max(project.token_time, of_token.served)
        of_token.served += turn.expected

    def _end(self, project: _Project, token: int, turn: Turn) -> None:
        self._running -= 1
        project.running -= 1
        project.busy = project.busy - turn.expected if project.running else 0.0
        project.served += turn.seconds - turn.expected
        project.credit -= turn.seconds - turn.expected
        project.cost += LEARNING * (turn.seconds - project.cost)
        project.tokens[token].served += turn.seconds - turn.expected
        self._give_turns()

    def _give_turns(self) -> None:
        contended = self._is_contended
        while True:
            ready = [
                project
                for project in self._projects.values()
                if project.waiting and self._may_run(project, contended=contended)
            ]
            if not ready:
                self._wait_for_credit()
                return
            self._give_turn(min(ready, key=lambda project: project.served))

    def _wait_for_credit(self) -> None:
        """Give turns again when the first of the projects that only lack credit has some."""
        if self._timer is not None or self._running >= self._most_running:
            return
        missing = [-self._credit(project) for project in self._projects.values() if project.waiting]
        if missing := [seconds for seconds in missing if seconds >= 0.0]:
            pause = min(missing) / self._share + MIN_REST
            self._timer = asyncio.get_running_loop().call_later(pause, self._rested)

    def _rested(self) -> None:
        self._timer = None
        self._give_turns()

    def _give_turn(self, project: _Project) -> None:
        """Start the first waiting request of the project's token that has been served least."""
        waiting = [(of.served, token) for token, of in project.tokens.items() if of.waiting]
        _, token = min(waiting)
        ready, turn = project.tokens[token].waiting.popleft()
        project.waiting -= 1
        if not ready.cancelled():
            self._start(project, token, turn)
            ready.set_result(None)
