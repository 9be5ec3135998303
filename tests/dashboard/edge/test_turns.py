"""Turns: which request of which project and token runs next."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fp8scope_dashboard.edge.callers import Caller
from fp8scope_dashboard.edge.turns import Turn, Turns, TurnsFullError

SMALL, LARGE = 0.002, 0.05


class Load:
    """Requests of projects. They run until `finish`, or one after the other with `end_next`."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.running: deque[tuple[int | None, asyncio.Event]] = deque()
        self.begun: list[int | None] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Let another project have sent just now, so that no project is alone."""
        await self.send(99)
        await self.end_next()
        self.begun.clear()

    async def send(
        self, project: int | None, count: int = 1, seconds: float = SMALL, token: int | None = None
    ) -> list[asyncio.Task[None]]:
        """Send requests of a project that take so many seconds each, with its only token or another."""
        caller = None if project is None else Caller(token or project, project)
        tasks = [asyncio.create_task(self._request(caller, seconds)) for _ in range(count)]
        self._tasks += tasks
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks

    async def _request(self, caller: Caller | None, seconds: float) -> None:
        async with self.turns.turn(caller) as turn:
            end = asyncio.Event()
            self.begun.append(caller and caller.token)
            self.running.append((caller and caller.project, end))
            await end.wait()
            turn.seconds = seconds

    async def end_next(self) -> None:
        """End the request that runs for longest."""
        self.running.popleft()[1].set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def finish_alone(self) -> None:
        """As `finish`, when no other project has sent for long."""
        while not all(task.done() for task in self._tasks):
            await asyncio.sleep(0.001)
            while self.running:
                await self.end_next()

    async def finish(self) -> None:
        while self.running:
            await self.end_next()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def turns(**options: Any) -> Turns:
    """Turns whose clock stands still."""
    return Turns(**{"burst": 1e9, **options}, clock=lambda: 0.0)


def scenario(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_it_works() -> None:
    async def work() -> None:
        load = Load(Turns(running=8, of_project=2))
        await load.send(1)
        await load.send(2, 50)
        assert load.begun == [1, 2, 2]
        await load.send(1)
        assert load.begun == [1, 2, 2, 1], "a project that sends little waits for nobody"
        await load.finish()
        assert load.begun.count(2) == 50

    scenario(work)


def test_projects_share_by_the_time_of_their_requests() -> None:
    """A hostile project whose requests take 25 times as long gets a 25th of the turns."""

    async def work() -> None:
        load = Load(turns(running=1, of_project=1))
        await load.begin()
        await load.send(1, 200, SMALL)
        await load.send(2, 200, LARGE)
        for _ in range(150):
            await load.end_next()
        first = Counter(load.begun[:150])
        assert first[1] * SMALL == pytest.approx(first[2] * LARGE, abs=2 * LARGE)
        await load.finish()

    scenario(work)


def test_a_project_that_sends_little_is_next() -> None:
    """However many requests of another one wait, and however long that was served before."""

    async def work() -> None:
        load = Load(turns(running=1, of_project=1))
        await load.begin()
        await load.send(1)
        await load.send(2, 100, LARGE)
        for _ in range(20):
            await load.end_next()
            await load.send(1)
            assert load.begun[-1] == 2
            await load.end_next()
            assert load.begun[-1] == 1
        await load.finish()

    scenario(work)


def test_being_idle_gives_no_credit() -> None:
    """A project that was idle while another was served shares from now on, and does not catch up."""

    async def work() -> None:
        load = Load(turns(running=1, of_project=1))
        await load.begin()
        await load.send(2)
        await load.send(1, 60)
        for _ in range(40):
            await load.end_next()
        load.begun.clear()
        await load.send(2, 60)
        for _ in range(20):
            await load.end_next()
        assert abs(load.begun.count(1) - load.begun.count(2)) <= 2
        await load.finish()

    scenario(work)


def test_expensive_requests_of_a_project_run_one_at_a_time() -> None:
    """They all compute in one interpreter, for which the small requests of others would wait."""

    async def work() -> None:
        load = Load(turns(running=8, of_project=4, busy=0.01))
        await load.begin()
        await load.send(1)
        await load.send(2, 30, LARGE)
        for _ in range(20):
            await load.end_next()
        await load.send(1, 10, SMALL)
        assert Counter(project for project, _ in load.running) == {1: 4, 2: 1}
        await load.finish()

    scenario(work)


def test_a_project_rests_when_it_has_used_its_share() -> None:
    """While others send, even if they want nothing at the moment: its requests also cost what nobody sees."""

    async def work() -> None:
        now = [0.0]
        load = Load(Turns(running=8, of_project=1, share=0.5, burst=0.12, clock=lambda: now[0]))
        await load.begin()
        await load.send(2, 20, LARGE)
        while load.running:
            await load.end_next()
        assert load.begun == [2, 2, 2], "three times .05 s use up .12 s"
        await load.send(1, 1, SMALL)
        assert load.begun == [2, 2, 2, 1]
        await load.end_next()
        now[0] = 0.2
        while len(load.begun) == 4:
            await asyncio.sleep(0.001)
        while load.running:
            await load.end_next()
        assert load.begun[4:] == [2, 2], "it has earned .1 s, less what it was overdrawn"
        now[0] = 100.0
        await load.finish_alone()
        assert load.begun.count(2) == 20

    scenario(work)


def test_tokens_of_a_project_share_its_turns() -> None:
    async def work() -> None:
        load = Load(turns(running=1, of_project=1))
        await load.begin()
        await load.send(1, 100, SMALL, token=11)
        await load.send(1, 3, SMALL, token=12)
        for _ in range(10):
            await load.end_next()
        assert load.begun[:10].count(12) == 3
        await load.finish()

    scenario(work)


def test_a_project_alone_is_not_bounded() -> None:
    async def work() -> None:
        now = [0.0]
        load = Load(Turns(running=2, of_project=2, seconds=2.0, clock=lambda: now[0]))
        await load.send(1)
        await load.end_next()
        now[0] = 5.0
        await load.send(2, 50)
        assert load.begun.count(2) == 50
        await load.finish()

    scenario(work)


def test_a_project_whose_requests_wait_for_long_still_sends() -> None:
    async def work() -> None:
        now = [0.0]
        load = Load(Turns(running=2, of_project=2, seconds=2.0, clock=lambda: now[0]))
        await load.send(1)
        await load.send(2, 50)
        now[0] = 5.0
        await load.send(2)
        assert load.begun.count(2) == 1, "project 1 still runs"
        await load.finish()

    scenario(work)


def test_people_are_not_bounded_and_do_not_bound() -> None:
    async def work() -> None:
        load = Load(Turns(running=2, of_project=2))
        await load.send(None, 5)
        await load.send(1, 5)
        assert load.begun == [None] * 5 + [1] * 5
        await load.finish()

    scenario(work)


def test_refuses_more_than_may_wait() -> None:
    async def work() -> None:
        load = Load(Turns(running=2, of_project=1, waiting=3))
        await load.send(1)
        tasks = await load.send(2, 10)
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 6
        assert all(isinstance(task.exception(), TurnsFullError) for task in refused)
        await load.finish()
        assert load.begun.count(2) == 4

    scenario(work)


@pytest.mark.parametrize("cancelled", [1, 5, 9])
def test_a_client_that_leaves_takes_no_turn(cancelled: int) -> None:
    async def work() -> None:
        shared = Turns(running=2, of_project=1)
        load = Load(shared)
        await load.send(1)
        tasks = await load.send(2, 10)
        tasks[cancelled].cancel()
        await asyncio.sleep(0)
        await load.finish()
        assert load.begun.count(2) == 9
        assert not shared._running
        assert not any(project.waiting or project.running for project in shared._projects.values())

    scenario(work)


def test_measures_the_processor_time_of_a_request() -> None:
    turn = Turn()
    assert turn.measured(lambda: sum(range(200_000)))() == 19_999_900_000
    busy = turn.seconds
    turn.measured(lambda: None)()
    assert busy > turn.seconds > 0
