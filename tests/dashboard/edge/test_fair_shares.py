"""A token that sends as much as it can waits for itself, and not the agents of another project."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server
from helpers.waiting import wait_until

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token

CONNECTIONS, REQUESTS = 16, 64


def large(writer: uuid.UUID, seq: int) -> dict[str, object]:
    """A message that takes the server a hundred times as long as that of an agent."""
    scalars = {f"s{number}": float(number) for number in range(50)}
    rows = [
        {"step": 1000 * seq + step, "time": "2026-01-01T00:00:00Z", "scalars": scalars} for step in range(200)
    ]
    return {"protocol": 1, "writer": str(writer), "seq": seq, "rows": rows}


def test_it_works(server: Server) -> None:
    """Few large requests are answered while a batch of an agent waits, though sixteen wait before it."""
    other = create_project("other", "Other")
    hostile = WireClient(server.url, create_token(other, "hostile")[1])
    agent = WireClient(server.url, server.token)
    assert hostile.register().status == agent.register().status == 201
    assert agent.send(agent.batch(0, [0], scalars={"loss": [1.0]})).status == 201

    answered: list[int] = []
    meanwhile = 0

    def flood(seqs: Sequence[int]) -> None:
        for seq in seqs:
            message = large(hostile.writer, seq)
            assert hostile.request("POST", "/batches", json=message).status == 201
            answered.append(seq)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        floods = [pool.submit(flood, range(first, REQUESTS, CONNECTIONS)) for first in range(CONNECTIONS)]
        wait_until(lambda: len(answered) > 0, "the first answer to the flood")
        for seq in range(1, 9):
            batch = agent.batch(seq, [seq], scalars={"loss": [1.0]})
            # Not between two batches: on a busy machine this process itself may be late with the next one.
            before = len(answered)
            assert agent.send(batch).status == 201
            meanwhile += len(answered) - before
        for each in floods:
            each.result()
    assert len(answered) == REQUESTS
    # One large request runs at a time, so about one ends while a batch is stored.
    assert meanwhile <= 2 * 8
