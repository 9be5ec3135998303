"""Requests above a limit on bytes, rows or names are refused; requests at the limit are accepted."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from contract.helpers.refusals import assert_refused, good, registered
from contract.helpers.wire_client import ARROW, WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry.models import Chunk
from fp8scope_dashboard.wire import limits


@pytest.fixture
def client(server: Server) -> WireClient:
    return registered(server)


def test_it_works(client: WireClient) -> None:
    """A batch with more tensors than the catalogue is refused until the catalogue names them."""
    body = good(client, tensors={"amax": [[1.0, 2.0, 3.0]] * 2})
    assert_refused(client.send(body), 409, "catalogue_gap")
    assert client.catalogue(["a", "b", "c"]).json == {"count": 3}
    assert client.send(body).status == 201


def test_refuses_more_tensors_than_a_run_may_have(client: WireClient) -> None:
    assert client.catalogue([f"t{i}" for i in range(limits.TENSORS - 2)], offset=2).json == {"count": 20_000}
    other = WireClient(client.url, client.token, run=client.run)
    assert other.catalogue(["a", "b"]).json == {"count": 2}
    assert_refused(other.catalogue(["one too many"], offset=2), 413, "too_large")
    assert Tensor.objects.count() == limits.TENSORS


def test_refuses_an_oversized_request(client: WireClient) -> None:
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        body = b"\xff" * (limits.REQUEST_BYTES + 1)
        sent: Any = (body[i : i + limits.MIB] for i in range(0, len(body), limits.MIB)) if headers else body
        answer = client.request("POST", "/batches", body=sent, headers={"Content-Type": ARROW})
        assert_refused(answer, 413, "too_large")


def test_a_request_of_exactly_the_limit_is_read(client: WireClient) -> None:
    answer = client.send(b"x" * limits.REQUEST_BYTES)
    assert_refused(answer, 400, "not_arrow")


def test_refuses_too_many_rows(client: WireClient) -> None:
    assert client.send(client.batch(0, range(limits.ROWS))).json["rows"] == limits.ROWS
    client.run, client.writer = Run.objects.get().id, uuid.uuid4()
    answer = client.send(client.batch(0, range(limits.ROWS + 1)))
    assert (answer.status, answer.code) == (413, "too_large")
    answer = client.send(client.batch(0, range(limits.ROWS + 1), record_batches=50))
    assert (answer.status, answer.code) == (413, "too_large")
    assert Chunk.objects.count() == 1


def test_refuses_too_many_names(client: WireClient) -> None:
    scalars = {f"s{i}": [1.0] for i in range(limits.SCALARS)}
    assert_refused(client.send(client.batch(0, [1], scalars={**scalars, "more": [1.0]})), 413, "too_large")
    assert client.send(client.batch(0, [1], scalars=scalars)).status == 201
    # The limit also holds for names that are added one at a time.
    answer = client.send(client.batch(1, [1], scalars={"more": [1.0]}))
    assert (answer.status, answer.code) == (422, "invalid")
    assert client.send(client.batch(1, [1], scalars={"s0": [1.0]})).status == 201
    statistics = {f"x{i}": [[1.0]] for i in range(limits.STATISTICS + 1)}
    answer = client.send(client.batch(2, [1], tensors=statistics))
    assert (answer.status, answer.code) == (413, "too_large")


def test_no_message_leaves_numbers_behind_that_later_ones_cannot_be_added_to(client: WireClient) -> None:
    """Several writers with the largest counts, and the largest number of a message."""
    largest = {"dropped": limits.MAX_COUNT, "errors": limits.MAX_COUNT, "pending": limits.MAX_COUNT}
    for _ in range(3):
        body = {"writer": str(uuid.uuid4()), **largest}
        assert client.request("POST", "/heartbeat", json=body).status == 200
        beyond = {**body, "errors": limits.MAX_COUNT + 1}
        assert_refused(client.request("POST", "/heartbeat", json=beyond), 422, "invalid")
    rows = [{"step": 1.0, "time": "2026-01-01T00:00:00Z", "scalars": {"loss": 1}}]
    batch = {"protocol": 1, "writer": str(client.writer), "rows": rows}
    assert_refused(
        client.request("POST", "/batches", json={**batch, "seq": limits.MAX_SEQ + 1}), 400, "malformed"
    )
    assert client.request("POST", "/batches", json={**batch, "seq": limits.MAX_SEQ}).status == 201
    position = client.request("GET", f"/writers/{client.writer}")
    assert (position.status, position.json["next_seq"]) == (200, limits.MAX_SEQ + 1)
