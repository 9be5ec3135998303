"""/healthz: whether this process and PostgreSQL respond, within a bounded time.

For load balancers and container checks. It is answered before Django, so that the host name and the redirect
to https do not matter. It runs on the event loop with a database connection of its own, so that neither busy
threads nor an exhausted connection pool delay it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import psycopg
from django.db import connections

from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.responses import answer
from fp8scope_dashboard.edge.scope import Application, Receive, Scope, Send

PATH: Final = "/healthz"


class Health:
    """An ASGI application in front of another that answers /healthz: 200 `ok`, or 503 with the reason."""

    def __init__(self, application: Application) -> None:
        self._application = application
        # One query to PostgreSQL at a time, regardless of how many clients ask and how long it hangs.
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = self._answered_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._application(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            await answer(send, 405, b"GET only\n", b"text/plain", (b"allow", b"GET, HEAD"))
        elif await self._database_answers():
            await answer(send, 200, b"ok\n", b"text/plain")
        else:
            await answer(send, 503, b"database unavailable\n", b"text/plain", (b"retry-after", b"2"))

    async def _database_answers(self) -> bool:
        now = time.monotonic()
        if now - self._answered_at < limits.HEALTH_FRESH_SECONDS:
            return True
        if self._asking is None or self._asking.done():
            self._asking, self._asked_at = asyncio.create_task(_ask()), now
            # Retrieves the exception of a query that nobody waits for any more.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        asking = self._asking
        patience = max(0.0, self._asked_at + limits.HEALTH_SECONDS - now)
        await asyncio.wait([asking], timeout=patience)
        if not asking.done():
            asking.cancel()
            return False
        if asking.cancelled() or asking.exception() is not None:
            return False
        self._answered_at = time.monotonic()
        return True


async def _ask() -> None:
    """Query PostgreSQL on a new connection.

    Raises:
        psycopg.Error: if it does not respond.
    """
    settings = connections["default"].settings_dict
    connection = await psycopg.AsyncConnection.connect(
        dbname=settings["NAME"],
        user=settings["USER"] or None,
        password=settings["PASSWORD"] or None,
        host=settings["HOST"] or None,
        port=settings["PORT"] or None,
        connect_timeout=max(2, round(limits.HEALTH_SECONDS)),
        application_name="fp8scope-health",
        autocommit=True,
    )
    try:
        await connection.execute("SELECT 1")
    finally:
        # Unlike `close`, does not wait for the server.
        connection.pgconn.finish()
