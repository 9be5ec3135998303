"""ASGI types, and the keys that the applications in front of Django write into a request's scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

Scope = dict[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CONNECTION: Final = "fp8scope.connection"
"""The connection of the request (servers/connections.py), if known."""
BODY_LIMIT: Final = "fp8scope.body_limit"
"""Maximum size of the body in bytes; without it the default of `BodyLimit` holds."""
POOL: Final = "fp8scope.pool"
"""Name of the request's pool (edge/thread_pools.py); without it, `KNOWN`."""
CALLER: Final = "fp8scope.caller"
"""The Caller of a request to the API with a valid token (edge/callers.py)."""
LATER: Final = "fp8scope.later"
"""A coroutine function that runs a function in the request's pool; None if the pool has few threads."""


def declared_length(scope: Scope) -> int:
    """The Content-Length of a request; 0 without one."""
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0
