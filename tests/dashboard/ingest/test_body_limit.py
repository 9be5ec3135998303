"""The ASGI wrapper that counts request bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.ingest.body_limit import BodyLimit

LIMIT = 10


async def read_all(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application that, like Django, drops a request whose client has gone."""
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
    """Run it in a thread: this one's loop may be in use, by a browser that another test drives."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


def ask(pieces: list[bytes], declared: int | None = None) -> tuple[int, bytes]:
    """Status and body of the answer to a request with these pieces."""
    sent: list[Mapping[str, Any]] = []
    waiting = [
        {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]

    async def receive() -> Mapping[str, Any]:
        # Beyond the last piece a server waits for the client to leave: here that would be for ever.
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
def test_the_limit_holds_however_the_body_is_cut(pieces: list[bytes], declared: bool) -> None:
    body = b"".join(pieces)
    status, answer = ask(pieces, len(body) if declared else None)
    if len(body) <= LIMIT:
        assert (status, answer) == (200, body)
    else:
        assert status == 413


@pytest.mark.parametrize("declared", [11, 10**30])
def test_a_declared_length_is_enough(declared: int) -> None:
    assert ask([b"x"], declared)[0] == 413


def test_what_is_not_http_passes() -> None:
    seen: list[str] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    run(BodyLimit(application)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
