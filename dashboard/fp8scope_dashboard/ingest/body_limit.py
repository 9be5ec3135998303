"""No request is larger than the limit, before Django has read it.

Django's ASGI handler writes a body to disk as long as it comes, whatever its settings say, when the client
does not declare a length. This wrapper counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fp8scope_dashboard.ingest import limits
from fp8scope_dashboard.ingest.errors import error_bytes

Scope = dict[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Most clients look for the answer only once they have sent everything: so much is read and thrown away.
DRAINED_BYTES = 4 * limits.REQUEST_BYTES


class BodyLimit:
    """An ASGI application in front of another: bodies beyond `limit` bytes are answered with 413."""

    def __init__(self, application: Application, limit: int = limits.REQUEST_BYTES) -> None:
        self._application = application
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
        elif _declared_length(scope) > self._limit:
            await _drain(receive)
            await self._refuse(send)
        else:
            counter = _Counter(receive, self._limit)
            await self._application(scope, counter.receive, send)
            if counter.exceeded:
                if counter.more:
                    await _drain(receive)
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        body = error_bytes(
            "too_large", f"A request may have at most {self._limit} bytes.", "Send it in several batches."
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Counter:
    """Passes a body on until it exceeds the limit; from there on the client seems to have gone.

    Django then drops the request without an answer, so that ours can follow.
    """

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self.exceeded = False
        self.more = True

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self.more = message.get("more_body", False)
            if self._left < 0:
                self.exceeded = True
                return {"type": "http.disconnect"}
        return message


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


async def _drain(receive: Receive) -> None:
    left = DRAINED_BYTES
    while left > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))
