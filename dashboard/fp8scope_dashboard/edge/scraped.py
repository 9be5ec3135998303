"""/metrics for monitoring that has the token, by any host name and without a redirect to https.

In a cluster each web process is asked at its own address, which the settings cannot name. Other clients go
on to Django, which knows sessions.
"""

from __future__ import annotations

from typing import Final

from django.db import close_old_connections

from fp8scope_dashboard.edge.responses import answer, refuse
from fp8scope_dashboard.edge.scope import Application, Receive, Scope, Send
from fp8scope_dashboard.edge.thread_pools import KNOWN, PoolFullError, ThreadPools
from fp8scope_dashboard.monitoring import exposition, status
from fp8scope_dashboard.monitoring.access import has_status_token

PATH: Final = "/metrics"


class Scraped:
    """An ASGI application in front of another."""

    def __init__(self, application: Application, pools: ThreadPools) -> None:
        self._application = application
        self._pools = pools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "GET":
            await self._application(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not has_status_token(headers.get(b"authorization", b"").decode("latin-1")):
            await self._application(scope, receive, send)
            return
        accept = headers.get(b"accept", b"").decode("latin-1")
        try:
            body, kind = await self._pools[KNOWN].run(lambda: _render(accept))
        except PoolFullError as error:
            await refuse(scope, send, error)
            return
        await answer(send, 200, body, kind.encode())


def _render(accept: str) -> tuple[bytes, str]:
    try:
        return exposition.render(status.current(), accept)
    finally:
        close_old_connections()
