"""Bodies are bounded in size, in time and in sum, before Django has read them.

Django's ASGI handler writes a body to memory and disk as long as it comes, whatever its settings say, and
waits for it for ever. This wrapper counts, and watches the clock.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fp8scope_dashboard.admission import limits as admission
from fp8scope_dashboard.admission.responses import refuse
from fp8scope_dashboard.admission.scope import BODY_LIMIT, Application, Message, Receive, Scope, Send
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import RefusalError, TooLargeError, UnavailableError

# Most clients look for the answer only once they have sent everything: so much is read and thrown away.
DRAINED_BYTES: Final = 4 * limits.REQUEST_BYTES


class TooSlowError(RefusalError):
    status, code = 408, "too_slow"


class Budget:
    """Bytes of bodies that are held at a time. Used from one event loop."""

    def __init__(self, size: int = admission.BODIES_BYTES) -> None:
        self._size = size
        self.held = 0

    def take(self, size: int) -> bool:
        """Count so many more bytes if they fit, and return whether they do. An empty budget fits any body."""
        if self.held and self.held + size > self._size:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        self.held -= size


class BodyLimit:
    """An ASGI application in front of another, which it lets read bodies only within bounds.

    Beyond `limit` bytes (or the scope's own limit) the answer is 413; where all bodies together take more
    than `budget`, 503; where a body takes longer than `seconds` and another second for each `rate` bytes,
    408.
    """

    def __init__(
        self,
        application: Application,
        limit: int = limits.REQUEST_BYTES,
        budget: Budget | None = None,
        seconds: float = admission.BODY_SECONDS,
        rate: float = admission.BODY_RATE,
    ) -> None:
        self._application = application
        self._limit = limit
        self._budget = budget or Budget()
        self._seconds = seconds
        self._rate = rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        limit = scope.get(BODY_LIMIT, self._limit)
        body = _Body(receive, limit, self._budget, self._seconds, self._rate)
        declared = _declared_length(scope)
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


class _Body:
    """Passes a body on within its bounds; beyond them the client seems to have gone.

    Django then drops the request without an answer, so that one that says `error` can follow.
    """

    def __init__(self, receive: Receive, limit: int, budget: Budget, seconds: float, rate: float) -> None:
        self._receive = receive
        self._limit = limit
        self._budget = budget
        self._rate = rate
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._seconds = seconds
        self._reserved = 0
        self._size = 0
        self._more = True
        self.error: RefusalError | None = None

    def reserve(self, size: int) -> bool:
        """Count so many bytes in all against the budget. Sets `error` where they do not fit."""
        if size <= max(self._reserved, admission.SMALL_BODY_BYTES):
            return True
        if not self._budget.take(size - self._reserved):
            self.error = UnavailableError(
                "The server is busy with other uploads.",
                "Wait for the seconds in Retry-After, then send again.",
            )
            return False
        self._reserved = size
        return True

    def release(self) -> None:
        self._budget.give_back(self._reserved)
        self._reserved = 0

    async def receive(self) -> Message:
        if not self._more:
            # What comes after a body is that the client leaves, whenever that is.
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline()):
                message = await self._receive()
        except TimeoutError:
            seconds = round(self._loop.time() - self._began)
            self.error = TooSlowError(
                f"The body did not come within {seconds} seconds.",
                f"Send at least {round(self._rate)} bytes a second.",
            )
            return {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._more = message.get("more_body", False)
            if self._size > self._limit:
                self.error = _too_large(self._limit)
            if self.error is not None or not self.reserve(self._size):
                return {"type": "http.disconnect"}
        return message

    async def drain(self, size: int) -> None:
        """Read and drop the rest of the body, at most `size` bytes, in the same time."""
        try:
            while self._more and self._size < size:
                async with asyncio.timeout_at(self._deadline()):
                    message = await self._receive()
                if message["type"] != "http.request":
                    return
                self._size += len(message.get("body", b""))
                self._more = message.get("more_body", False)
        except TimeoutError:
            pass

    def _deadline(self) -> float:
        return self._began + self._seconds + self._size / self._rate


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"A request may have at most {limit} bytes.", "Send it in several batches.")


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0
