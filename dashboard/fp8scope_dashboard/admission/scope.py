"""The types of ASGI, and what the parts in front of Django write into a request's scope for each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

Scope = dict[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CONNECTION: Final = "fp8scope.connection"
"""The connection that the request came on (servers/connections.py), where it is known."""
BODY_LIMIT: Final = "fp8scope.body_limit"
"""The most bytes that the body may have; without it the application's limit holds."""
LANE: Final = "fp8scope.lane"
"""The name of the request's lane (admission/lanes.py); without it the request has the threads of `KNOWN`."""
