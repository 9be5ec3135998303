"""Answer ordinary requests with batches without Django's request, middlewares and routing.

These are nearly all requests of a busy server, and what Django does for each takes as long as storing a small
batch twice. Only requests of the plainest form are taken. All others, such as large ones and those that are
refused for their address, go to Django's handler, whose view calls the same `batches.take`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast
from uuid import UUID

from django.core.exceptions import DisallowedHost
from django.db import InterfaceError, OperationalError, connection
from django.http import HttpRequest, HttpResponse
from django.middleware.clickjacking import XFrameOptionsMiddleware
from django.middleware.common import CommonMiddleware
from django.middleware.security import SecurityMiddleware
from ninja.responses import NinjaJSONEncoder

from fp8scope_dashboard.api import batches
from fp8scope_dashboard.api.errors import refusal_of
from fp8scope_dashboard.api.responses import Known
from fp8scope_dashboard.edge.responses import refuse
from fp8scope_dashboard.edge.scope import CALLER, Application, Receive, Scope, Send, declared_length
from fp8scope_dashboard.edge.thread_pools import BATCHES, PoolFullError, ThreadPools
from fp8scope_dashboard.edge.turns import TurnsFullError
from fp8scope_dashboard.wire import schemas

# Django logs every refusal there.
logger = logging.getLogger("django.request")

PATH: Final = re.compile(r"/api/v1/runs/([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})/batches")
NUMBER: Final = re.compile(r"[0-9]{1,18}")
# Larger bodies go through Django, which keeps them in files.
LARGEST: Final = 2_000_000
# Host names and schemes whose headers are remembered.
MAX_FRAMES: Final = 64

Headers = list[tuple[bytes, bytes]]


class DirectBatches:
    """An ASGI application in front of another: answers batches, and passes on everything else."""

    def __init__(self, application: Application, pools: ThreadPools) -> None:
        self._application = application
        self._pools = pools
        self._frames: dict[tuple[Any, ...], Headers | None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _read(scope) if scope["type"] == "http" and CALLER in scope else None
        headers = None if sent is None else self._frame(scope)
        if sent is None or headers is None:
            await self._application(scope, receive, send)
            return
        body = await _body_of(receive)
        if body is None:
            return
        try:
            async with self._pools.turns.turn(scope[CALLER]) as turn:
                work = partial(_respond, replace(sent, body=body), scope["path"])
                status, more, answer = await self._pools[BATCHES].run(turn.measured(work))
        except (PoolFullError, TurnsFullError) as error:
            await refuse(scope, send, error)
            return
        length = (b"Content-Length", str(len(answer)).encode())
        start = {"type": "http.response.start", "status": status, "headers": [*headers, *more, length]}
        await send(start)
        await send({"type": "http.response.body", "body": answer})

    def _frame(self, scope: Scope) -> Headers | None:
        """The headers of every answer; None if Django refuses or redirects requests with this Host."""
        given = dict(scope["headers"])
        key = (given.get(b"host"), given.get(b"x-forwarded-proto"), str(scope.get("scheme", "http")))
        if key not in self._frames:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[key] = _headers_of(scope, *key)
        return self._frames[key]


def _read(scope: Scope) -> batches.Sent | None:
    """The request, still without its body; None if it is not of the plainest form."""
    path = PATH.fullmatch(scope["path"])
    if path is None or scope["method"] != "POST" or scope.get("root_path"):
        return None
    given = dict(scope["headers"])
    if len(given) < len(scope["headers"]) or b"content-encoding" in given or b"expect" in given:
        return None
    if not 0 < declared_length(scope) <= LARGEST:
        return None
    said = _known(scope.get("query_string", b"").decode("latin-1"))
    kind = given.get(b"content-type", b"").decode("latin-1").lower()
    if said is None or kind not in (batches.ARROW, batches.JSON):
        return None
    _, _, secret = given[b"authorization"].decode("latin-1").partition(" ")
    received, urgent = said
    return batches.Sent(
        run=UUID(path[1]), secret=secret.strip(), kind=kind, body=b"", received=received, urgent=urgent
    )


def _known(query: str) -> tuple[Known, bool] | None:
    """Return what the query says; None if it has anything else than numbers, each once."""
    values: dict[str, int] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in ("alerts_after", "commands_after", "urgent") or name in values:
            return None
        if not NUMBER.fullmatch(value) or (name == "urgent" and value not in ("0", "1")):
            return None
        values[name] = int(value)
    urgent = bool(values.pop("urgent", 0))
    # Checked above, except for what has a default.
    return Known.model_construct(None, **{"alerts_after": 0, "commands_after": None, **values}), urgent


async def _body_of(receive: Receive) -> bytes | None:
    """The body; None if the client has left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _respond(sent: batches.Sent, path: str) -> tuple[int, Headers, bytes]:
    """Status, further headers and body of the answer. Runs in a thread of its pool."""
    try:
        status, document = _take(sent)
    except Exception as error:
        refusal = refusal_of(error, f"POST {path}")
        level = logging.WARNING if refusal.status < 500 else logging.ERROR
        logger.log(level, "%s: %s", HTTPStatus(refusal.status).phrase, path)
        more = [(name.encode(), value.encode()) for name, value in refusal.headers().items()]
        return refusal.status, more, _as_json(refusal.as_dict())
    return status, [], _as_json(schemas.Receipt.model_validate(document).model_dump())


def _take(sent: batches.Sent) -> tuple[int, dict[str, Any]]:
    """Take a batch with the connection that this thread has kept since the last one.

    Taking a connection from the pool and checking it takes a round trip. Instead, a batch whose connection
    turns out to be broken is taken again: nothing is stored twice.
    """
    was_open = connection.connection is not None
    try:
        return batches.take(sent)
    except (OperationalError, InterfaceError):
        if connection.connection is not None and not connection.connection.broken:
            raise
        connection.close()
        if not was_open:
            raise
    return batches.take(sent)


def _as_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, cls=NinjaJSONEncoder).encode()


def _headers_of(scope: Scope, host: bytes | None, forwarded: bytes | None, scheme: str) -> Headers | None:
    """The headers that Django's middlewares give to an answer of the API; None if they answer themselves."""
    request = HttpRequest()
    request.method, request.path = "POST", scope["path"]
    request._get_scheme = lambda: scheme  # type: ignore[attr-defined]
    if host is not None:
        request.META["HTTP_HOST"] = host.decode("latin-1")
    if forwarded is not None:
        request.META["HTTP_X_FORWARDED_PROTO"] = forwarded.decode("latin-1")

    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=201, content_type="application/json; charset=utf-8")

    try:
        request.get_host()
        chain = SecurityMiddleware(CommonMiddleware(XFrameOptionsMiddleware(view)))
        response = cast("HttpResponse", chain(request))
    except (DisallowedHost, KeyError):
        return None
    if response.status_code != 201:
        return None
    del response["Content-Length"]
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
