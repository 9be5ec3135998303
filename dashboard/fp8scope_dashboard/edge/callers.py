"""The tokens and sessions that this process has seen to be valid.

They decide only how a request is admitted before it is authenticated: a request with a known token or session
is not limited as an unauthenticated one and does not wait behind those. Every request is still authenticated
against the database. Each web process has its own set: after a restart, a caller is unauthenticated once.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from fp8scope_dashboard.edge import limits


class Caller(NamedTuple):
    """The ids of a token and of its project."""

    token: int
    project: int


class Callers:
    """A bounded set of secrets, stored as hashes. Drops the least recently added. Thread-safe.

    The secret of a token has its `Caller`.
    """

    def __init__(self, most: int = limits.CALLERS_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._digests: OrderedDict[bytes, Caller | None] = OrderedDict()

    def add(self, secret: str, caller: Caller | None = None) -> None:
        digest = _digest(secret)
        with self._lock:
            self._digests[digest] = caller
            self._digests.move_to_end(digest)
            while len(self._digests) > self._most:
                self._digests.popitem(last=False)

    def discard(self, secret: str) -> None:
        with self._lock:
            self._digests.pop(_digest(secret), None)

    def get(self, secret: str) -> Caller | None:
        """The caller of a token's secret; None if it is not in the set."""
        digest = _digest(secret)
        with self._lock:
            return self._digests.get(digest)

    def __contains__(self, secret: str) -> bool:
        digest = _digest(secret)
        with self._lock:
            return digest in self._digests


tokens = Callers()
sessions = Callers()


Responder = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


@sync_and_async_middleware
def remember_sessions(get_response: Responder) -> Responder:
    """Middleware that keeps `sessions` up to date. Must be the first: it looks at the request afterwards."""
    if iscoroutinefunction(get_response):

        async def middleware_of_coroutines(request: HttpRequest) -> HttpResponseBase:
            response = await cast("Awaitable[HttpResponseBase]", get_response(request))
            _remember_session(request)
            return response

        return middleware_of_coroutines

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = cast("HttpResponseBase", get_response(request))
        _remember_session(request)
        return response

    return middleware


def _remember_session(request: HttpRequest) -> None:
    """Remember the session of an answered request if its user is signed in, else forget it."""
    session = getattr(request, "session", None)
    # Where AuthenticationMiddleware keeps the user. Reading `request.user` would query the database for views
    # that never asked who the user is.
    user = getattr(request, "_cached_user", None)
    if session is None or user is None:
        return
    if not user.is_authenticated:
        # Signed out or expired: the session itself no longer has a key.
        sessions.discard(request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""))
    elif session.session_key:
        sessions.add(session.session_key)


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(errors="replace"), digest_size=16).digest()
