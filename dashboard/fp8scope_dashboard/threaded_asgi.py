"""Django's way from ASGI to a view and back, with one change of threads instead of a dozen.

Django's own ASGI handler runs each middleware that was written for threads in a thread of its own accord:
a request changes between the event loop and a new thread at every one of them. Here the whole of a request to
a view that is a plain function, from the first middleware to the encoded answer, is one piece of work for one
thread. Threads are kept for the next request, and the database connection is back in its pool before the
answer is sent. Coroutine views, which wait rather than work, go Django's own way. Middlewares, their order
and what they decide are the same on both.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import IO

from asgiref.sync import ThreadSensitiveContext, iscoroutinefunction, sync_to_async
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.handlers.base import BaseHandler
from django.db import close_old_connections
from django.http import FileResponse
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve, set_script_prefix

from fp8scope_dashboard.admission.callers import remember_session
from fp8scope_dashboard.admission.lanes import KNOWN, LaneFullError, Lanes
from fp8scope_dashboard.admission.responses import refuse
from fp8scope_dashboard.admission.scope import LANE, Receive, Scope, Send


class Handler:
    """The ASGI application: each request by the handler that its view is made for."""

    def __init__(self, lanes: Lanes | None = None) -> None:
        self._functions = ThreadHandler(lanes)
        self._coroutines = ASGIHandler()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_coroutine(scope):
            await self._functions(scope, receive, send)
        else:
            await self._coroutines(scope, receive, send)


class ThreadHandler(ASGIHandler):
    """Answers each request in one thread of its lane."""

    def __init__(self, lanes: Lanes | None = None) -> None:
        BaseHandler.__init__(self)
        self.load_middleware(is_async=False)
        self._lanes = lanes or Lanes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        # Only now: who sends a body slowly keeps no place among those that wait.
        try:
            lane = self._lanes[scope.get(LANE, KNOWN)]
            response: HttpResponseBase = await lane.run(partial(self._respond, scope, body))
        except LaneFullError as error:
            body.close()
            await refuse(scope, send, error)
            return
        if response.streaming:
            await self._stream(response, receive, send)
        else:
            await self.send_response(response, send)

    def _respond(self, scope: Scope, body: IO[bytes]) -> HttpResponseBase:
        """The answer. Unless it is a stream it needs nothing any more: it is closed, and so is the body."""
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=self.__class__, scope=scope)
        request, response = self.create_request(scope, body)
        if request is None:
            body.close()
        else:
            response = self.get_response(request)
            remember_session(request)
        assert response is not None
        # What the signal at its end is told.
        response._handler_class = self.__class__  # type: ignore[attr-defined]
        if not response.streaming:
            response.close()
            return response
        # What is still to be sent asks for connections of its own.
        close_old_connections()
        if isinstance(response, FileResponse):
            response.block_size = self.chunk_size
        return response

    async def _stream(self, response: HttpResponseBase, receive: Receive, send: Send) -> None:
        """Send an answer in parts, until it ends or the client leaves."""
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
