"""Counts requests, measures them, and gives each an id for the logs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from fp8scope_dashboard.edge.scope import Application, Receive, Scope, Send
from fp8scope_dashboard.instrumentation import log_context
from fp8scope_dashboard.instrumentation.metrics import REQUEST_DURATION, REQUESTS
from fp8scope_dashboard.instrumentation.tracing import tracer

HEADER: Final = b"x-request-id"
# By the beginning of the path; `batches` and `live` by its end.
KINDS: Final = (("/api/", "api"), ("/mlflow/", "mlflow"), ("/otlp/", "otlp"), ("/static/", "static"))
BATCHES: Final = "/batches"
LIVE: Final = "live"
GONE: Final = "disconnected"
"""The status of a request whose client left before the answer."""


class Measured:
    """An ASGI application in front of another. Answers have an X-Request-ID, the client's if it sent one."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        request_id = _request_id(scope)
        answer = _MeasuredAnswer(send, request_id.encode())
        context = log_context.of_request(request_id, scope["path"])
        fields = {f"fp8scope.{field}": value for field, value in context.items()}
        token = log_context.context.set(context)
        began = time.perf_counter()
        try:
            with tracer.request(f"{scope['method']} {_kind(scope['path'])}", _carrier(scope), fields) as span:
                await self._application(scope, receive, answer)
                if span is not None:
                    span.set_attribute("http.response.status_code", answer.status)
        finally:
            log_context.context.reset(token)
            kind = LIVE if answer.is_stream else _kind(scope["path"])
            REQUESTS.add(kind, answer.status)
            if kind != LIVE:
                REQUEST_DURATION.observe(time.perf_counter() - began, kind)


class _MeasuredAnswer:
    """Sends the answer, and keeps its status."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self.status = GONE
        self.is_stream = False
        self._send = send
        self._request_id = request_id

    async def __call__(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self.status = str(message["status"])
            self.is_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in headers
            )
            message = {**message, "headers": [*headers, (HEADER, self._request_id)]}
        await self._send(message)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == HEADER and log_context.REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            return str(text)
    return uuid4().hex


def _carrier(scope: Scope) -> dict[str, str]:
    """The trace that a request belongs to, as its headers say."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in (b"traceparent", b"tracestate")
    }


def _kind(path: str) -> str:
    for beginning, kind in KINDS:
        if path.startswith(beginning):
            return "batches" if kind == "api" and path.endswith(BATCHES) else kind
    return "pages"
