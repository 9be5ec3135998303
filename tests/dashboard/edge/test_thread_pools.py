"""ThreadPools: separate thread pools for authenticated callers, visitors and password checks."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from fp8scope_dashboard.edge.thread_pools import (
    KNOWN,
    PASSWORDS,
    VISITORS,
    PoolFullError,
    ThreadPool,
    ThreadPools,
)

marker: ContextVar[str] = ContextVar("marker", default="")


def run(work: object) -> None:
    """Run it in another thread, because the browser of another test may use the loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()  # type: ignore[arg-type]


def test_it_works() -> None:
    async def work() -> None:
        pool = ThreadPool("some", 1, 0)
        marker.set("seen")
        assert await pool.run(lambda: marker.get()) == "seen"
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert (await pool.run(lambda: threading.current_thread().name)).startswith("some")

    run(work())


def test_refuses_requests_when_the_queue_is_full() -> None:
    async def work() -> None:
        pool, go = ThreadPool("some", 2, 3), threading.Event()
        inside = [asyncio.create_task(pool.run(lambda: go.wait(60))) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(PoolFullError) as refused:
            await pool.run(lambda: None)
        assert (refused.value.status, refused.value.headers()) == (503, {"Retry-After": "1"})
        go.set()
        assert await asyncio.gather(*inside) == [True] * 5
        assert await pool.run(lambda: 1) == 1

    run(work())


def test_full_pools_do_not_block_other_pools() -> None:
    async def work() -> None:
        pools, go = ThreadPools(), threading.Event()
        waiting: list[asyncio.Task[bool]] = []
        for name in (VISITORS, PASSWORDS):
            with pytest.raises(PoolFullError):
                while True:
                    waiting.append(asyncio.create_task(pools[name].run(lambda: go.wait(60))))
                    await asyncio.sleep(0)
                    if waiting[-1].done():
                        waiting.pop().result()
        assert await pools[KNOWN].run(lambda: "answered") == "answered"
        go.set()
        assert all(await asyncio.gather(*waiting))

    run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="Threads have a niceness of their own only on Linux.")
def test_hashing_passwords_gives_way_to_other_requests() -> None:
    """It needs no interpreter, so it would take a processor from what agents wait for."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def work() -> None:
        pools, usual = ThreadPools(), niceness()
        assert await pools[PASSWORDS].run(niceness) > usual
        assert await pools[KNOWN].run(niceness) == usual == niceness()

    run(work())


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_hashes_leave_processors_to_others(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)

    async def work() -> None:
        pool, go = ThreadPools()[PASSWORDS], threading.Event()
        begun: list[int] = []

        def hash_password() -> None:
            begun.append(threading.get_ident())
            go.wait(60)

        hashes = [asyncio.create_task(pool.run(hash_password)) for _ in range(4)]
        while len(begun) < threads:
            await asyncio.sleep(0.001)
        go.set()
        await asyncio.gather(*hashes)
        assert len(set(begun)) <= threads

    run(work())
