"""Admit requests by their headers, before the body is read and before Django sees them.

A request with a token or session that this process knows to be valid passes at once. An unknown token is
looked up first, in the few threads for unauthenticated clients. All other requests are unauthenticated: their
rate per address, the size of their bodies and the number of threads that answer them are limited. So they
cannot take the threads, database connections and memory that training processes need.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections
from django.http import parse_cookie
from django.urls import reverse

from fp8scope_dashboard.accounts import attempts, services
from fp8scope_dashboard.accounts.addresses import address_group
from fp8scope_dashboard.accounts.tokens import why_refused
from fp8scope_dashboard.edge import callers, limits
from fp8scope_dashboard.edge.callers import Caller
from fp8scope_dashboard.edge.credentials import secret_in
from fp8scope_dashboard.edge.quotas import counts
from fp8scope_dashboard.edge.rate import Rate
from fp8scope_dashboard.edge.responses import API, refuse
from fp8scope_dashboard.edge.scope import (
    BODY_LIMIT,
    CALLER,
    CONNECTION,
    POOL,
    Application,
    Receive,
    Scope,
    Send,
    declared_length,
)
from fp8scope_dashboard.edge.thread_pools import PASSWORDS, VISITORS, ThreadPools
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


class Admission:
    """An ASGI application in front of another: admits each request, possibly with limits, or refuses it."""

    def __init__(
        self,
        application: Application,
        pools: ThreadPools,
        identify: Callable[[str], tuple[int, int] | None] = services.token_and_project,
    ) -> None:
        self._application = application
        self._pools = pools
        self._identify = identify
        # Refusals that cost too much if they are sent as fast as they are asked for.
        self._refusals = Rate(limits.REFUSAL_BURST, limits.REFUSAL_RATE, limits.ADDRESSES_KEPT)
        self._delayed = 0
        self._rate = Rate(limits.UNAUTHENTICATED_BURST, limits.UNAUTHENTICATED_RATE, limits.ADDRESSES_KEPT)
        self._sign_in = reverse("signin")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._admit(scope)
            except (BadTokenError, NoTokenError) as error:
                # An agent may still be sending its batch: read some of it, so that it sees the reason.
                await refuse(scope, send, error, receive)
                return
            except SlowDownError as error:
                await self._delay(scope)
                await refuse(scope, send, error, receive if CALLER in scope else None)
                return
            except RefusalError as error:
                await refuse(scope, send, error)
                return
        await self._application(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        """Write the limits of a request into its scope.

        Raises:
            RefusalError: if the request is not admitted.
        """
        authorization, cookies = _credentials(scope)
        is_known = False
        if scope["path"].startswith(API):
            if secret := secret_in(authorization):
                caller = await self._check_token(scope, secret)
                scope[CALLER] = caller
                is_known = True
                counts.take(*caller, requests=1, bytes=declared_length(scope))
            elif scope["method"] not in READING:
                raise NoTokenError
        else:
            session = parse_cookie(cookies).get(settings.SESSION_COOKIE_NAME, "")
            is_known = bool(session) and session in callers.sessions
            if not is_known:
                self._count(scope, "session" if session else "nobody")
        if not is_known:
            self._treat_as_unauthenticated(scope)
        elif (connection := scope.get(CONNECTION)) is not None:
            connection.prove()

    async def _delay(self, scope: Scope) -> None:
        """Hold back the refusal of a client that asks again as soon as it is refused.

        Reading a request and refusing it takes the interpreter from the threads that work for others. Then a
        client gets at most one answer a second on each connection, and its connections are limited.
        """
        client = f"token {scope[CALLER].token}" if CALLER in scope else _address(scope)
        if self._refusals.take(client) or self._delayed >= limits.MAX_DELAYED:
            return
        self._delayed += 1
        try:
            await asyncio.sleep(limits.REFUSAL_DELAY_SECONDS)
        finally:
            self._delayed -= 1

    async def _check_token(self, scope: Scope, secret: str) -> Caller:
        if (caller := callers.tokens.get(secret)) is not None:
            return caller
        if not services.TOKEN_FORM.fullmatch(secret):
            raise BadTokenError
        self._count(scope, "token")
        try:
            ids = await self._pools[VISITORS].run(lambda: self._look_up(secret))
        except (DatabaseError, InterfaceError) as error:
            logger.error("A token could not be checked: the database failed: %s", type(error).__name__)
            raise UnavailableError(
                "The database is not available.", "Wait for the seconds in Retry-After, then send again."
            ) from error
        caller = Caller(*ids)
        callers.tokens.add(secret, caller)
        return caller

    def _look_up(self, secret: str) -> tuple[int, int]:
        """The ids of a token and its project.

        Raises:
            BadTokenError: the secret does not work; the message says why.
        """
        try:
            ids = self._identify(secret)
            if ids is None:
                raise BadTokenError(why_refused(secret))
            return ids
        finally:
            close_old_connections()

    def _treat_as_unauthenticated(self, scope: Scope) -> None:
        if scope["path"].startswith(API):
            self._count(scope, "nobody")
        scope[BODY_LIMIT] = limits.UNAUTHENTICATED_BODY_BYTES
        scope[POOL] = VISITORS if scope["method"] in READING else PASSWORDS
        if scope[POOL] == PASSWORDS and scope["path"] == self._sign_in:
            # The same answer as the page's, but without a thread: a refused attempt must cost almost nothing.
            wait = attempts.attempts.refused_for(_address(scope))
            if wait > 0:
                raise TooManyRequestsError(wait)

    def _count(self, scope: Scope, kind: str) -> None:
        """Count an unauthenticated request by address and kind: a flood of one leaves room for the others.

        Raises:
            TooManyRequestsError: if the address exceeds its rate.
        """
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
