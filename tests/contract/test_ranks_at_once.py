"""Ranks begin one run at the same moment: one creates what the others take, without an error."""

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


def at_once(calls: list[Callable[[], int]]) -> Counter[int]:
    """Each on a thread of its own, begun together; how often each status was answered."""
    barrier = threading.Barrier(len(calls))
    statuses: list[int] = []

    def call(one: Callable[[], int]) -> None:
        barrier.wait()
        statuses.append(one())

    threads = [threading.Thread(target=call, args=(one,)) for one in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(statuses)


def registered(rank: WireClient) -> int:
    return rank.register().status


def sent(rank: WireClient) -> int:
    return rank.send(rank.batch(0, [1], scalars={"loss": [1.0]})).status


def complaints() -> int:
    """How often PostgreSQL has said by now that a key is there already."""
    log = Path(os.environ["FP8SCOPE_TEST_SERVERS"]) / "postgres" / "server.log"
    return log.read_text(errors="replace").count("duplicate key value")


def test_it_works(server: Server) -> None:
    before = complaints()
    for number in range(ROUNDS):
        ranks = [WireClient(server.url, server.token) for _ in range(RANKS)]
        for rank in ranks:
            rank.run = ranks[0].run
        assert at_once([partial(registered, rank) for rank in ranks]) == {201: 1, 200: RANKS - 1}
        stored = at_once([partial(sent, rank) for rank in ranks])
        assert stored == {201: RANKS} and Run.objects.count() == number + 1
        assert Writer.objects.filter(run=ranks[0].run).count() == RANKS
    assert complaints() == before
