"""How a request is refused before Django sees it: for programs, for the API, and for people."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fp8scope_dashboard.edge.responses import refuse
from fp8scope_dashboard.wire.errors import SlowDownError

BROWSER = [(b"accept", b"text/html,application/xhtml+xml,*/*;q=0.8")]


def refused(path: str, headers: list[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], str]:
    """The headers and the body of the response."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    error = SlowDownError("Too many <requests>.", "Wait a moment.")
    asyncio.run(refuse({"path": path, "headers": headers}, send, error))
    assert sent[0]["status"] == 429
    return dict(sent[0]["headers"]), sent[1]["body"].decode()


def test_it_works() -> None:
    headers, body = refused("/p/demo/", [(b"accept", b"*/*")])
    assert headers[b"content-type"].startswith(b"text/plain") and headers[b"connection"] == b"close"
    assert body == "Too many <requests>. Wait a moment.\n"


def test_the_api_answers_in_json() -> None:
    headers, body = refused("/api/v1/runs", BROWSER)
    assert headers[b"content-type"] == b"application/json"
    assert json.loads(body)["error"]["code"] == "slow_down"


def test_a_browser_gets_a_page() -> None:
    headers, body = refused("/p/demo/", BROWSER)
    assert headers[b"content-type"].startswith(b"text/html") and b"retry-after" in headers
    assert int(headers[b"content-length"]) == len(body.encode())
    assert "<h1>Too many &lt;requests&gt;.</h1>" in body and "Wait a moment." in body
    assert "src=" not in body and "href=" not in body
