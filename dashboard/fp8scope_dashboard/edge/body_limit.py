"""Limit the size, the duration and the total size of request bodies before Django reads them.

Regardless of its settings, Django's ASGI handler stores a body of any size in memory and on disk, and waits
for it without a timeout.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fp8scope_dashboard.edge import limits
from fp8scope_dashboard.edge.quotas import counts
from fp8scope_dashboard.edge.responses import refuse
from fp8scope_dashboard.edge.scope import (
    BODY_LIMIT,
    CALLER,
    Application,
    Message,
    Receive,
    Scope,
    Send,
    declared_length,
)
from fp8scope_dashboard.wire import limits as wire_limits
from fp8scope_dashboard.wire.errors import RefusalError, TooLargeError, UnavailableError

# Most clients read the response only after they have sent the whole body: so much of it is read and dropped.
DRAINED_BYTES: Final = 4 * wire_limits.REQUEST_BYTES


class TooSlowError(RefusalError):
    status, code = 408, "too_slow"


class BodyBudget:
    """The total size of the bodies that this process holds at a time. Use it from one event loop.

    The bodies of one project may take half of it, so that the uploads of one leave room for the others.
    """

    def __init__(self, size: int = limits.BODIES_BYTES) -> None:
        self._size = size
        self._held_by: dict[int | None, int] = {}
        self.held = 0

    def take(self, size: int, project: int | None = None) -> bool:
        """Reserve bytes, and return whether they fit. A single body always fits an unused budget."""
        own = self._held_by.get(project, 0)
        if self.held and self.held + size > self._size:
            return False
        if project is not None and own and own + size > self._size // 2:
            return False
        self.held += size
        self._held_by[project] = own + size
        return True

    def give_back(self, size: int, project: int | None = None) -> None:
        self.held -= size
        self._held_by[project] = self._held_by.get(project, 0) - size
        if not self._held_by[project]:
            del self._held_by[project]


class BodyLimit:
    """An ASGI application in front of another that limits request bodies.

    The response is 413 to a body above `limit` bytes (or the limit in the scope), 503 if all bodies together
    exceed `budget`, and 408 if a body takes longer than `seconds` plus one second per `rate` bytes.
    """

    def __init__(
        self,
        application: Application,
        limit: int = wire_limits.REQUEST_BYTES,
        budget: BodyBudget | None = None,
        seconds: float = limits.BODY_SECONDS,
        rate: float = limits.BODY_RATE,
    ) -> None:
        self._application = application
        self._limit = limit
        self._budget = budget or BodyBudget()
        self._seconds = seconds
        self._rate = rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        limit = scope.get(BODY_LIMIT, self._limit)
        caller = scope.get(CALLER)
        project = None if caller is None else caller.project
        body = _BoundedBody(
            receive=receive,
            limit=limit,
            budget=self._budget,
            seconds=self._seconds,
            rate=self._rate,
            project=project,
        )
        declared = declared_length(scope)
        try:
            if declared > limit:
                body.error = _too_large(limit)
            elif body.reserve(declared):
                await self._application(scope, body.receive, send)
            if body.error is not None:
                if isinstance(body.error, TooLargeError) and BODY_LIMIT not in scope:
                    await body.drain(DRAINED_BYTES)
                await refuse(scope, send, body.error)
        finally:
            body.release()
            if caller is not None and body.size > declared:
                # Of a body without a Content-Length, which admission could not count.
                counts.note(caller.token, caller.project, bytes=body.size - declared)


class _BoundedBody:
    """Passes a body on until it exceeds a limit, then reports to Django that the client has disconnected.

    Django then drops the request without a response, so that `BodyLimit` can send one for `error`.
    """

    def __init__(
        self,
        receive: Receive,
        limit: int,
        budget: BodyBudget,
        seconds: float,
        rate: float,
        project: int | None = None,
    ) -> None:
        self._project = project
        self._receive = receive
        self._limit = limit
        self._budget = budget
        self._rate = rate
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._seconds = seconds
        self._reserved = 0
        self.size = 0
        self._more = True
        self.error: RefusalError | None = None

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes in total of the budget. Sets `error` if they do not fit."""
        if size <= max(self._reserved, limits.SMALL_BODY_BYTES):
            return True
        if not self._budget.take(size - self._reserved, self._project):
            self.error = UnavailableError(
                "The server is busy with other uploads.",
                "Wait for the seconds in Retry-After, then send again.",
            )
            return False
        self._reserved = size
        return True

    def release(self) -> None:
        self._budget.give_back(self._reserved, self._project)
        self._reserved = 0

    async def receive(self) -> Message:
        if not self._more:
            # After a body comes only the disconnect, at any later time.
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline()):
                message = await self._receive()
        except TimeoutError:
            seconds = round(self._loop.time() - self._began)
            self.error = TooSlowError(
                f"The body did not arrive within {seconds} seconds.",
                f"Send at least {round(self._rate)} bytes per second.",
            )
            return {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self.size += len(message.get("body", b""))
            self._more = message.get("more_body", False)
            if self.size > self._limit:
                self.error = _too_large(self._limit)
            if self.error is not None or not self.reserve(self.size):
                return {"type": "http.disconnect"}
        return message

    async def drain(self, size: int) -> None:
        """Read and drop the rest of the body, up to `size` bytes, within the same deadline."""
        try:
            while self._more and self.size < size:
                async with asyncio.timeout_at(self._deadline()):
                    message = await self._receive()
                if message["type"] != "http.request":
                    return
                self.size += len(message.get("body", b""))
                self._more = message.get("more_body", False)
        except TimeoutError:
            pass

    def _deadline(self) -> float:
        return self._began + self._seconds + self.size / self._rate


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"A request may have at most {limit} bytes.", "Send it in several batches.")
