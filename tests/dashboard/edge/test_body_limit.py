"""The ASGI wrapper that bounds the size, time and total memory of request bodies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.edge.body_limit import BodyBudget, BodyLimit
from fp8scope_dashboard.edge.limits import SMALL_BODY_BYTES
from fp8scope_dashboard.edge.scope import BODY_LIMIT

LIMIT = 10


async def read_all(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application that, like Django, drops a request when its client disconnects."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it in another thread, because the browser of another test may use the loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


def ask(pieces: list[bytes], declared: int | None = None) -> tuple[int, bytes]:
    """Status and body of the response to a request with these pieces."""
    sent: list[Mapping[str, Any]] = []
    waiting = [
        {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]

    async def receive() -> Mapping[str, Any]:
        # After the last piece, a server waits for a disconnect; here that would be forever.
        assert waiting, "read beyond the end of the body"
        return waiting.pop(0)

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    headers = [] if declared is None else [(b"content-length", str(declared).encode())]
    scope = {"type": "http", "path": "/api/v1/runs", "headers": headers}
    run(BodyLimit(read_all, LIMIT)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], sent[1]["body"]


def test_it_works() -> None:
    assert ask([b"0123", b"456789"], declared=10) == (200, b"0123456789")
    status, body = ask([b"0123", b"456789a"], declared=11)
    assert (status, json.loads(body)["error"]["code"]) == (413, "too_large")


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=5), st.booleans())
def test_the_limit_holds_for_any_split_of_the_body(pieces: list[bytes], declared: bool) -> None:
    body = b"".join(pieces)
    status, answer = ask(pieces, len(body) if declared else None)
    if len(body) <= LIMIT:
        assert (status, answer) == (200, body)
    else:
        assert status == 413


@pytest.mark.parametrize("declared", [11, 10**30])
def test_refuses_a_declared_length_above_the_limit(declared: int) -> None:
    assert ask([b"x"], declared)[0] == 413


def test_passes_other_protocols_through() -> None:
    seen: list[str] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    run(BodyLimit(application)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


class Silent:
    """A client that sends some pieces and then stalls."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)

    async def receive(self) -> Mapping[str, Any]:
        if self.pieces:
            return {"type": "http.request", "body": self.pieces.pop(0), "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError


def statuses_of(application: BodyLimit, *receivers: Any, length: int | None = None) -> list[int]:
    """The statuses of concurrent requests, in the order of the responses."""
    sent: list[int] = []

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "path": "/api/v1/runs", "headers": headers}

    async def all_of_them() -> None:
        await asyncio.gather(*(application(dict(scope), receive, send) for receive in receivers))

    run(all_of_them())
    return sent


@pytest.mark.parametrize("pieces", [(), (b"x",), (b"x" * 100_000,)])
def test_a_body_that_does_not_arrive_times_out(pieces: tuple[bytes, ...]) -> None:
    budget = BodyBudget()
    application = BodyLimit(read_all, budget=budget, seconds=0.2, rate=10**6)
    began = time.monotonic()
    assert statuses_of(application, Silent(*pieces).receive) == [408]
    assert time.monotonic() - began >= 0.2
    assert budget.held == 0


def test_a_body_that_keeps_its_rate_may_take_long() -> None:
    left = [b"x" * 1000] * 6

    async def receive() -> Mapping[str, Any]:
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    assert statuses_of(BodyLimit(read_all, seconds=0.2, rate=5000), receive) == [200]
    assert left == []


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_share_a_budget(declared: bool) -> None:
    """A body that exceeds the budget is refused at once; the others release their share."""
    size = 4 * SMALL_BODY_BYTES
    budget = BodyBudget(2 * size)
    application = BodyLimit(read_all, budget=budget, seconds=0.5, rate=10**9)
    silent = [Silent(bytes(size)).receive for _ in range(5)]
    assert statuses_of(application, *silent, length=size if declared else None) == [503] * 3 + [408] * 2
    assert budget.held == 0


def test_small_bodies_need_no_budget() -> None:
    budget = BodyBudget(1)
    assert budget.take(1)

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": bytes(SMALL_BODY_BYTES), "more_body": False}

    assert statuses_of(BodyLimit(read_all, budget=budget), receive, length=SMALL_BODY_BYTES) == [200]


def test_the_scope_may_lower_the_limit() -> None:
    sent: list[int] = []

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message.get("status", 0))

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b"12345", "more_body": False}

    scope = {"type": "http", "path": "/signin/", "headers": [], BODY_LIMIT: 4}
    run(BodyLimit(read_all)(scope, receive, send))
    assert sent == [413, 0]
