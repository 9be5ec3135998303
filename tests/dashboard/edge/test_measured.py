"""Counts, durations and ids of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from fp8scope_dashboard.edge.measured import Measured
from fp8scope_dashboard.edge.scope import Receive, Scope, Send
from fp8scope_dashboard.instrumentation import log_context, metrics
from fp8scope_dashboard.instrumentation.counts import Key

Message = Mapping[str, Any]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[Key, float]:
    amounts: dict[Key, float] = {}

    def add(key: Key, amount: float) -> None:
        amounts[key] = amounts.get(key, 0.0) + amount

    monkeypatch.setattr(metrics.counts, "add", add)
    return amounts


def ask(
    path: str, *headers: tuple[bytes, bytes], status: int = 200, kind: bytes = b"text/plain"
) -> dict[str, str]:
    """The headers of an answer, and the log context in which it was made."""
    seen: dict[str, str] = {}

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update({f"context {name}": text for name, text in log_context.context.get().items()})
        if status:
            await send(
                {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}
            )
            await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        seen.update({name.decode(): value.decode() for name, value in message.get("headers", ())})

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
    asyncio.run(Measured(application)(scope, receive, send))
    assert not log_context.context.get()
    return seen


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/api/v1/runs/3f0c9c5e-0000-4000-8000-000000000000/batches", "batches"),
        ("/api/v1/runs", "api"),
        ("/mlflow/api/2.0/mlflow/runs/search", "mlflow"),
        ("/otlp/v1/metrics", "otlp"),
        ("/static/pages/app.css", "static"),
        ("/", "pages"),
        ("/batches", "pages"),
    ],
)
def test_a_request_is_counted_by_the_kind_of_address(path: str, kind: str, counted: dict[Key, float]) -> None:
    ask(path, status=404)
    assert counted[("fp8scope_http_requests", (kind, "404"), "")] == 1.0
    durations = {key: value for key, value in counted.items() if key[0] == "fp8scope_http_request_seconds"}
    assert {key[1] for key in durations} == {(kind,)} and len(durations) == 2


def test_live_updates_have_no_duration(counted: dict[Key, float]) -> None:
    ask("/p/default/live", kind=b"text/event-stream; charset=utf-8")
    assert counted == {("fp8scope_http_requests", ("live", "200"), ""): 1.0}


def test_a_client_that_leaves_is_counted(counted: dict[Key, float]) -> None:
    ask("/", status=0)
    assert counted[("fp8scope_http_requests", ("pages", "disconnected"), "")] == 1.0


@pytest.mark.usefixtures("counted")
def test_the_id_of_a_proxy_is_taken_over() -> None:
    answer = ask("/", (b"x-request-id", b"4f0c-11"))
    assert answer["x-request-id"] == answer["context request"] == "4f0c-11"


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 65, b"a\xc3", b"fp8s_secret", b"a] level=ERROR"])
def test_other_ids_are_replaced(sent: bytes) -> None:
    answer = ask("/", (b"x-request-id", sent))
    assert answer["x-request-id"].encode() != sent and len(answer["x-request-id"]) == 32


@pytest.mark.usefixtures("counted")
def test_two_requests_have_two_ids() -> None:
    assert ask("/")["x-request-id"] != ask("/")["x-request-id"]
