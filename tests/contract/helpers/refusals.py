"""Shared by the tests of bad input: a registered client, a valid batch, and a check of refusals."""

from __future__ import annotations

from typing import Any

from contract.helpers.wire_client import Answer, WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.telemetry.models import Chunk


def registered(server: Server) -> WireClient:
    """The client of a run with two tensors."""
    client = WireClient(server.url, server.token)
    assert client.register().status == 201
    assert client.catalogue(["a", "b"]).status == 200
    return client


def good(client: WireClient, seq: int = 0, **columns: Any) -> bytes:
    """A batch that the server accepts; `columns` override parts of it."""
    return client.batch(seq, [1, 2], **{"scalars": {"loss": [1.0, 2.0]}, **columns})


def assert_refused(answer: Answer, status: int, code: str) -> None:
    """Check the status and the error code, and that nothing was stored."""
    assert (answer.status, answer.code) == (status, code), answer.body
    assert not Chunk.objects.exists()
    assert not Receipt.objects.exists()
