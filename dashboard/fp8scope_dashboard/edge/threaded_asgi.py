"""An ASGI handler for Django that answers each request to a synchronous view in one thread.

Django's own ASGI handler moves a request between the event loop and a thread at every middleware that is not
written for asyncio. This handler runs the whole request, from the first middleware to the encoded response,
as one job of one thread. Threads are reused, and the database connection is back in its pool before the
response is sent. Coroutine views, which wait rather than work, go through Django's own handler. The
middlewares, their order and their decisions are the same on both ways.

It extends parts of `ASGIHandler` that Django does not document. `make_handler` therefore uses it only with
the Django versions that it is tested with, and Django's own handler with any other.
benchmarks/request_handlers.py compares it with that handler and with a2wsgi.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import IO, Final

import django
from asgiref.sync import ThreadSensitiveContext, iscoroutinefunction, sync_to_async
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.handlers.base import BaseHandler
from django.db import close_old_connections
from django.http import FileResponse
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve, set_script_prefix

from fp8scope_dashboard.edge.responses import refuse
from fp8scope_dashboard.edge.scope import CALLER, LATER, POOL, Application, Receive, Scope, Send
from fp8scope_dashboard.edge.thread_pools import KNOWN, PoolFullError, ThreadPools
from fp8scope_dashboard.edge.turns import TurnsFullError

logger = logging.getLogger(__name__)

FILE_BLOCK: Final = 2**21
"""Bytes of a file that are read at a time. Each read is one job of a thread, which waits for the interpreter
while others compute: the largest script comes in one."""
TESTED_VERSIONS: Final = frozenset({(5, 2)})
"""Django versions whose ASGIHandler has the parts that `ThreadHandler` uses."""


def make_handler(pools: ThreadPools, tested: Collection[tuple[int, int]] = TESTED_VERSIONS) -> Application:
    """The ASGI handler of the project: `Handler`, or Django's own with a version that is not in `tested`."""
    major, minor = django.VERSION[:2]
    if (major, minor) in tested:
        return Handler(pools)
    logger.warning(
        "fp8scope is not tested with Django %d.%d: requests go through Django's own ASGI handler, which is"
        " slower, and unauthenticated requests share their threads with all others.",
        major,
        minor,
    )
    handler: Application = ASGIHandler()
    return handler


class Handler:
    """Gives each request to the handler for its view: `ThreadHandler`, or Django's for coroutine views."""

    def __init__(self, pools: ThreadPools | None = None) -> None:
        self._functions = ThreadHandler(pools)
        self._coroutines = ASGIHandler()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_coroutine(scope):
            await self._functions(scope, receive, send)
        else:
            await self._coroutines(scope, receive, send)


class ThreadHandler(ASGIHandler):
    """Answers each request in one thread of its pool."""

    def __init__(self, pools: ThreadPools | None = None) -> None:
        BaseHandler.__init__(self)
        self.load_middleware(is_async=False)
        self._pools = pools or ThreadPools()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        # Only now: a client that sends its body slowly occupies neither a thread nor a place in the queue.
        try:
            pool = self._pools[scope.get(POOL, KNOWN)]
            scope[LATER] = pool.run if scope.get(POOL, KNOWN) == KNOWN else None
            async with self._pools.turns.turn(scope.get(CALLER)) as turn:
                work = turn.measured(partial(self._respond, scope, body))
                response: HttpResponseBase = await pool.run(work)
        except (PoolFullError, TurnsFullError) as error:
            body.close()
            await refuse(scope, send, error)
            return
        if response.streaming:
            await self._stream(response, receive, send)
        else:
            await self.send_response(response, send)

    def _respond(self, scope: Scope, body: IO[bytes]) -> HttpResponseBase:
        """The response to a request. Unless it is streaming, it is closed already, and so is the body."""
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=self.__class__, scope=scope)
        request, response = self.create_request(scope, body)
        if request is None:
            body.close()
        else:
            response = self.get_response(request)
        assert response is not None
        # The sender of the signal request_finished.
        response._handler_class = self.__class__  # type: ignore[attr-defined]
        if not response.streaming:
            response.close()
            return response
        # The parts of the stream open database connections themselves.
        close_old_connections()
        if isinstance(response, FileResponse):
            response.block_size = FILE_BLOCK
        return response

    async def _stream(self, response: HttpResponseBase, receive: Receive, send: Send) -> None:
        """Send a streaming response until it ends or the client disconnects."""
        async with ThreadSensitiveContext():
            gone = asyncio.create_task(self.listen_for_disconnect(receive))
            sending = asyncio.create_task(self.send_response(response, send))
            try:
                await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (gone, sending):
                    task.cancel()
                with suppress(asyncio.CancelledError, RequestAborted):
                    await gone
                try:
                    with suppress(asyncio.CancelledError):
                        await sending
                finally:
                    await sync_to_async(response.close)()


def _is_coroutine(scope: Scope) -> bool:
    try:
        return iscoroutinefunction(resolve(scope["path"].removeprefix(get_script_prefix(scope))).func)
    except Resolver404:
        return False
