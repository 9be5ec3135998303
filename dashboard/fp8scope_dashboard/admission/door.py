"""Who sends a request is decided on its headers, before its body is read and before Django sees it.

A request with a token or a session that this process knows to be good goes on at once. A token that it does
not know is looked up first, by the few threads that strangers have. All else is a stranger's request: an
address may send so many of them, their bodies are small, and few are answered at a time. So strangers cannot
take the threads, the database connections or the memory that training processes need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections
from django.http import parse_cookie
from django.urls import reverse

from fp8scope_dashboard.accounts import attempts, services
from fp8scope_dashboard.accounts.addresses import address_group
from fp8scope_dashboard.admission import callers, limits
from fp8scope_dashboard.admission.addresses import Rate
from fp8scope_dashboard.admission.lanes import PASSWORDS, VISITORS, Lanes
from fp8scope_dashboard.admission.responses import API, refuse
from fp8scope_dashboard.admission.scope import (
    BODY_LIMIT,
    CONNECTION,
    LANE,
    Application,
    Receive,
    Scope,
    Send,
)
from fp8scope_dashboard.api.auth import HINT
from fp8scope_dashboard.wire.errors import (
    BadTokenError,
    NoTokenError,
    RefusalError,
    SlowDownError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class TooManyRequestsError(SlowDownError):
    def __init__(self, seconds: int = limits.BUSY_SECONDS) -> None:
        unit = "second" if seconds == 1 else "seconds"
        super().__init__("Too many requests from your address.", f"Wait {seconds} {unit}, then try again.")
        self.retry_after = seconds


class Door:
    """An ASGI application in front of another: decides how each request is treated, or refuses it."""

    def __init__(
        self, application: Application, lanes: Lanes, is_token: Callable[[str], bool] = services.is_token
    ) -> None:
        self._application = application
        self._lanes = lanes
        self._is_token = is_token
        self._rate = Rate(limits.STRANGER_BURST, limits.STRANGER_RATE, limits.ADDRESSES_KEPT)
        self._sign_in = reverse("signin")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._admit(scope)
            except (BadTokenError, NoTokenError) as error:
                # An agent may be in the middle of a batch: it must see why.
                await refuse(scope, send, error, receive)
                return
            except RefusalError as error:
                await refuse(scope, send, error)
                return
        await self._application(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        """Note in the scope how the request is to be treated.

        Raises:
            RefusalError: it is not to be treated at all.
        """
        authorization, cookies = _credentials(scope)
        is_known = False
        if scope["path"].startswith(API):
            scheme, _, secret = authorization.partition(" ")
            if scheme.lower() == "bearer" and secret.strip():
                await self._check_token(scope, secret.strip())
                is_known = True
            elif scope["method"] not in READING:
                raise NoTokenError("The request carries no token.", HINT)
        else:
            session = parse_cookie(cookies).get(settings.SESSION_COOKIE_NAME, "")
            is_known = bool(session) and session in callers.sessions
            if not is_known:
                self._count(scope, "session" if session else "nobody")
        if not is_known:
            self._treat_as_stranger(scope)
        elif (connection := scope.get(CONNECTION)) is not None:
            connection.prove()

    async def _check_token(self, scope: Scope, secret: str) -> None:
        if secret in callers.tokens:
            return
        if not services.TOKEN_FORM.fullmatch(secret):
            raise BadTokenError("The token is unknown or was revoked.", HINT)
        self._count(scope, "token")
        try:
            is_token = await self._lanes[VISITORS].run(lambda: self._look_up(secret))
        except (DatabaseError, InterfaceError) as error:
            logger.error("A token could not be checked: the database failed: %s", type(error).__name__)
            raise UnavailableError(
                "The database is away.", "Wait for Retry-After, then send again."
            ) from error
        if not is_token:
            raise BadTokenError("The token is unknown or was revoked.", HINT)
        callers.tokens.add(secret)

    def _look_up(self, secret: str) -> bool:
        try:
            return self._is_token(secret)
        finally:
            close_old_connections()

    def _treat_as_stranger(self, scope: Scope) -> None:
        if scope["path"].startswith(API):
            self._count(scope, "nobody")
        scope[BODY_LIMIT] = limits.STRANGER_BODY_BYTES
        scope[LANE] = VISITORS if scope["method"] in READING else PASSWORDS
        if scope[LANE] == PASSWORDS and scope["path"] == self._sign_in:
            # As the page would answer, but without a thread: a refused attempt must cost next to nothing.
            wait = attempts.attempts.refused_for(_address(scope))
            if wait > 0:
                raise TooManyRequestsError(wait)

    def _count(self, scope: Scope, kind: str) -> None:
        """Count a stranger's request, apart by kind: a flood of one kind leaves room for the others."""
        if not self._rate.take(f"{kind} {_address(scope)}"):
            raise TooManyRequestsError


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return address_group(client[0] if client else None)


def _credentials(scope: Scope) -> tuple[str, str]:
    """The headers Authorization and Cookie."""
    authorization, cookies = b"", []
    for name, value in scope["headers"]:
        if name == b"authorization":
            authorization = value
        elif name == b"cookie":
            cookies.append(value)
    return authorization.decode("latin-1"), b"; ".join(cookies).decode("latin-1")
