"""Turns of projects: how many of their requests run at a time."""

from __future__ import annotations

import asyncio

import pytest

from fp8scope_dashboard.admission.turns import Turns, TurnsFullError


class Load:
    """Requests of projects. They run until `finish`."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.running: list[int | None] = []
        self._end = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, project: int | None, count: int = 1) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._request(project)) for _ in range(count)]
        self._tasks += tasks
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks

    async def _request(self, project: int | None) -> None:
        async with self.turns.turn(project):
            self.running.append(project)
            await self._end.wait()

    async def finish(self) -> None:
        self._end.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_it_works() -> None:
    async def scenario() -> None:
        load = Load(Turns(running=2))
        await load.send(1)
        await load.send(2, 50)
        assert load.running == [1, 2, 2]
        await load.send(1)
        assert load.running == [1, 2, 2, 1], "a project that sends little waits for nobody"
        await load.finish()
        assert load.running.count(2) == 50

    asyncio.run(scenario())


def test_a_project_alone_is_not_bounded() -> None:
    async def scenario() -> None:
        now = [0.0]
        load = Load(Turns(running=2, seconds=2.0, clock=lambda: now[0]))
        await load.send(1)
        now[0] = 5.0
        await load.send(2, 50)
        assert load.running.count(2) == 50
        await load.finish()

    asyncio.run(scenario())


def test_people_are_not_bounded_and_do_not_bound() -> None:
    async def scenario() -> None:
        load = Load(Turns(running=2))
        await load.send(None, 5)
        await load.send(1, 5)
        assert load.running == [None] * 5 + [1] * 5
        await load.finish()

    asyncio.run(scenario())


def test_refuses_more_than_may_wait() -> None:
    async def scenario() -> None:
        load = Load(Turns(running=1, waiting=3))
        await load.send(1)
        tasks = await load.send(2, 10)
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 6
        assert all(isinstance(task.exception(), TurnsFullError) for task in refused)
        await load.finish()
        assert load.running.count(2) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("cancelled", [1, 5, 9])
def test_a_client_that_leaves_takes_no_turn(cancelled: int) -> None:
    async def scenario() -> None:
        turns = Turns(running=1)
        load = Load(turns)
        await load.send(1)
        tasks = await load.send(2, 10)
        tasks[cancelled].cancel()
        await asyncio.sleep(0)
        await load.finish()
        assert load.running.count(2) == 9
        assert not turns._running and not turns._waiting

    asyncio.run(scenario())
