"""Views that report how they were called, and a client of ASGI applications."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from django.db import connections
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import include, path, reverse
from django.utils import translation

from fp8scope_dashboard.accounts.models import Project

Application = Callable[..., Any]
Headers = Mapping[str, str]


@dataclass
class Answer:
    """The response of an application."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """The events of the views before the response began."""

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


# Events that the views below record for the tests.
events: list[str] = []
meeting = threading.Barrier(2)


def where(request: HttpRequest) -> HttpResponse:
    return HttpResponse(threading.current_thread().name)


async def awaited(request: HttpRequest) -> HttpResponse:
    asyncio.get_running_loop()
    return HttpResponse(threading.current_thread().name)


def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.body)


def database(request: HttpRequest) -> HttpResponse:
    held.append(connections["default"])
    held[0].ensure_connection()
    return HttpResponse(str(Project.objects.count()))


def meet(request: HttpRequest) -> HttpResponse:
    meeting.wait(60)
    return HttpResponse("met")


def address(request: HttpRequest) -> HttpResponse:
    language = translation.get_language()
    translation.activate("de")
    return HttpResponse(f"{reverse('address')} {language}")


def parts(request: HttpRequest) -> StreamingHttpResponse:
    async def count() -> AsyncIterator[bytes]:
        try:
            for i in range(int(request.GET["count"])):
                yield b"%d " % i
                await asyncio.sleep(0)
            if "fail" in request.GET:
                raise ValueError("in the middle of the stream")
        finally:
            events.append("stream ended")

    return StreamingHttpResponse(count())


def file(request: HttpRequest) -> FileResponse:
    return FileResponse(open(__file__, "rb"))


def bug(request: HttpRequest) -> HttpResponse:
    raise ValueError("a bug")


held: list[Any] = []
urlpatterns = [
    path("where", where),
    path("awaited", awaited),
    path("echo", echo),
    path("database", database),
    path("meet", meet),
    path("address", address, name="address"),
    path("parts", parts),
    path("file", file),
    path("bug", bug),
    path("", include("fp8scope_dashboard.urls")),
]


def run(work: Callable[[], Any]) -> Any:
    """Run it in another thread, because the browser of another test may use the loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


async def request(
    application: Application,
    target: str,
    method: str = "GET",
    headers: Headers | None = None,
    pieces: tuple[bytes, ...] = (b"",),
    root: str = "",
    leaves_after: int | None = None,
    answer: Answer | None = None,
    on_start: Callable[[], Awaitable[None]] | None = None,
) -> Answer:
    """Send a request to an ASGI application as a server would.

    The client disconnects after `leaves_after` parts. `answer` is filled while the response arrives.
    `on_start` is awaited after status and headers, before any part.
    """
    answer = answer or Answer()
    waiting = list(pieces)
    gone = asyncio.Event()

    async def receive() -> Mapping[str, Any]:
        if waiting:
            piece = waiting.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(waiting)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], list(message["headers"])
            answer.done = list(events)
            if on_start is not None:
                await on_start()
            return
        answer.parts.append(message.get("body", b""))
        if leaves_after is not None and len(answer.parts) >= leaves_after:
            gone.set()

    address, _, query = target.partition("?")
    given = {"host": "testserver", **(headers or {})}
    await application(
        {
            "type": "http",
            "method": method,
            "path": root + address,
            "root_path": root,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
            "scheme": "http",
        },
        receive,
        send,
    )
    return answer


def ask(application: Application, target: str, *options: Any, **more: Any) -> Answer:
    answer: Answer = run(lambda: request(application, target, *options, **more))
    return answer
