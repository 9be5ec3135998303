"""Requests that write to a server, repeated while it is away or busy."""

import time
from collections.abc import Mapping
from typing import Any, Final

from fp8scope.config import Settings
from fp8scope.delivery.transport import Backoff, NextAction, Transport

PATIENCE_SECONDS: Final = 120.0
"""Seconds for which a request is repeated."""


REFUSALS: Final = ("invalid", "media_full", "too_large", "malformed")
"""Codes of a message with media that the server does not take, while it takes others."""
CONTENT_NEEDED: Final = "content_needed"
"""Code of a message with the hash alone of a content that the project does not have."""


class TransferError(RuntimeError):
    """A run could not be exported or imported; the message says why. `code` is the server's, or empty."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Poster:
    """Sends requests below /api/v1/runs."""

    def __init__(self, settings: Settings) -> None:
        self._transport = Transport(settings)

    def post(self, method: str, path: str, body: bytes, kind: str = "application/json") -> Mapping[str, Any]:
        """Send a request and return the answer.

        Raises:
            TransferError: the server refuses it, or does not answer for two minutes.
        """
        backoff, deadline = Backoff(0.5, 10.0), time.monotonic() + PATIENCE_SECONDS
        while True:
            outcome = self._transport.send(method, f"/runs/{path}", body, kind)
            if outcome.action is NextAction.DONE:
                return outcome.answer
            if outcome.action not in (NextAction.WAIT, NextAction.RETRY) or time.monotonic() > deadline:
                message = outcome.message or outcome.code or f"HTTP {outcome.status}"
                raise TransferError(message, outcome.code)
            time.sleep(max(outcome.wait or 0.0, backoff.next(), 0.01))

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()
