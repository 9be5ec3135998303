"""Responses that are sent before Django sees a request."""

from __future__ import annotations

import asyncio
from html import escape
from typing import Final

from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.scope import Receive, Scope, Send
from fp8scope_dashboard.wire.errors import RefusalError, error_bytes

API: Final = ("/api/", "/mlflow/", "/otlp/")
"""Beginnings of the addresses that need a token."""
# For people. It asks for no other file: such a request could be refused as well.
PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%(message)s</title><style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto; padding: 0 20px; max-width: 32rem }
h1 { font-size: 1.4rem; line-height: 1.25 }
p { opacity: 0.8 }
</style></head><body><main><p>%(status)d</p><h1>%(message)s</h1><p>%(hint)s</p></main></body></html>
"""


async def answer(
    send: Send, status: int, body: bytes, kind: bytes, *more: tuple[bytes, bytes], last: bool = True
) -> None:
    """Send a whole response. With `last=False` the caller must still send the final, empty part."""
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def refuse(scope: Scope, send: Send, error: RefusalError, receive: Receive | None = None) -> None:
    """Refuse a request with `error` and close the connection.

    With `receive`, some of the body is read and dropped first, unless too many requests do so already. Most
    clients read the response only after they have sent the whole body.
    """
    more = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    more.append((b"connection", b"close"))
    if scope["path"].startswith(API):
        kind, body = b"application/json", error_bytes(error.code, error.message, error.hint)
    elif b"text/html" in dict(scope.get("headers", ())).get(b"accept", b""):
        words = {"status": error.status, "message": escape(error.message), "hint": escape(error.hint)}
        kind, body = b"text/html; charset=utf-8", (PAGE % words).encode()
    else:
        kind, body = b"text/plain; charset=utf-8", f"{error.message} {error.hint}\n".encode()
    if receive is None or not _lingering.room:
        await answer(send, error.status, body, kind, *more)
        return
    await answer(send, error.status, body, kind, *more, last=False)
    await _lingering.drop(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Lingering:
    """Reads and drops the rest of refused bodies, for a few requests at a time and a bounded time."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def room(self) -> bool:
        return self._count < limits.LINGERING

    async def drop(self, receive: Receive) -> None:
        self._count += 1
        try:
            async with asyncio.timeout(limits.LINGER_SECONDS):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass
        finally:
            self._count -= 1


_lingering = _Lingering()
