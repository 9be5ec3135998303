"""Lanes: separate thread pools for authenticated callers, visitors and password checks."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from fp8scope_dashboard.admission.lanes import KNOWN, PASSWORDS, VISITORS, Lane, LaneFullError, Lanes

marker: ContextVar[str] = ContextVar("marker", default="")


def run(work: object) -> None:
    """Run it in another thread, because the browser of another test may use the loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()  # type: ignore[arg-type]


def test_it_works() -> None:
    async def work() -> None:
        lane = Lane("some", 1, 0)
        marker.set("seen")
        assert await lane.run(lambda: marker.get()) == "seen"
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        assert (await lane.run(lambda: threading.current_thread().name)).startswith("some")

    run(work())


def test_refuses_requests_when_the_queue_is_full() -> None:
    async def work() -> None:
        lane, go = Lane("some", 2, 3), threading.Event()
        inside = [asyncio.create_task(lane.run(lambda: go.wait(60))) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(LaneFullError) as refused:
            await lane.run(lambda: None)
        assert (refused.value.status, refused.value.headers()) == (503, {"Retry-After": "1"})
        go.set()
        assert await asyncio.gather(*inside) == [True] * 5
        assert await lane.run(lambda: 1) == 1

    run(work())


def test_full_lanes_do_not_block_other_lanes() -> None:
    async def work() -> None:
        lanes, go = Lanes(), threading.Event()
        waiting: list[asyncio.Task[bool]] = []
        for name in (VISITORS, PASSWORDS):
            with pytest.raises(LaneFullError):
                while True:
                    waiting.append(asyncio.create_task(lanes[name].run(lambda: go.wait(60))))
                    await asyncio.sleep(0)
                    if waiting[-1].done():
                        waiting.pop().result()
        assert await lanes[KNOWN].run(lambda: "answered") == "answered"
        go.set()
        assert all(await asyncio.gather(*waiting))

    run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="Threads have a niceness of their own only on Linux.")
def test_hashing_passwords_gives_way_to_other_requests() -> None:
    """It needs no interpreter, so it would take a processor from what agents wait for."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def work() -> None:
        lanes, usual = Lanes(), niceness()
        assert await lanes[PASSWORDS].run(niceness) > usual
        assert await lanes[KNOWN].run(niceness) == usual == niceness()

    run(work())


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_hashes_leave_processors_to_others(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)

    async def work() -> None:
        lane, go = Lanes()[PASSWORDS], threading.Event()
        begun: list[int] = []

        def hash_password() -> None:
            begun.append(threading.get_ident())
            go.wait(60)

        hashes = [asyncio.create_task(lane.run(hash_password)) for _ in range(4)]
        while len(begun) < threads:
            await asyncio.sleep(0.001)
        go.set()
        await asyncio.gather(*hashes)
        assert len(set(begun)) <= threads

    run(work())
