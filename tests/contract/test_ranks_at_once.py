"""Ranks that start one run at the same time share it: one creates it, and PostgreSQL logs no error."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.runs.models import Run, Writer

RANKS, ROUNDS = 12, 8


def call_concurrently(calls: list[Callable[[], int]]) -> Counter[int]:
    """Call all functions at the same time, each in its own thread; counts the returned statuses."""
    barrier = threading.Barrier(len(calls))
    statuses: list[int] = []

    def call(request: Callable[[], int]) -> None:
        barrier.wait()
        statuses.append(request())

    threads = [threading.Thread(target=call, args=(request,)) for request in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(statuses)


def register(rank: WireClient) -> int:
    return rank.register().status


def send(rank: WireClient) -> int:
    return rank.send(rank.batch(0, [1], scalars={"loss": [1.0]})).status


def duplicate_key_errors() -> int:
    """How many duplicate keys PostgreSQL has logged so far."""
    log = Path(os.environ["FP8SCOPE_TEST_SERVERS"]) / "postgres" / "server.log"
    return log.read_text(errors="replace").count("duplicate key value")


def test_it_works(server: Server) -> None:
    before = duplicate_key_errors()
    for number in range(ROUNDS):
        ranks = [WireClient(server.url, server.token) for _ in range(RANKS)]
        for rank in ranks:
            rank.run = ranks[0].run
        assert call_concurrently([partial(register, rank) for rank in ranks]) == {201: 1, 200: RANKS - 1}
        stored = call_concurrently([partial(send, rank) for rank in ranks])
        assert stored == {201: RANKS} and Run.objects.count() == number + 1
        assert Writer.objects.filter(run=ranks[0].run).count() == RANKS
    assert duplicate_key_errors() == before
