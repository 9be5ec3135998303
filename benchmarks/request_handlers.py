"""Compare ways to serve synchronous Django views behind an ASGI server. Prints one JSON line.

- `django`: Django's own ASGI handler.
- `threaded_asgi`: `fp8scope_dashboard.edge.threaded_asgi`, one thread for a whole request.
- `a2wsgi`: Django's WSGI handler in `a2wsgi.WSGIMiddleware` for synchronous views, Django's ASGI handler for
  event streams. Skipped where a2wsgi is not installed (`pip install a2wsgi`).

Each serves the same application from one granian worker with the same middleware. Measured are
a JSON response (`get`), a 200 kB body (`post`), `get` while 100 event streams are open, and `get` while
`--stalled` clients have sent half of a body and then nothing. The handlers take turns `--rounds` times; the
medians are printed.

    python benchmarks/request_handlers.py [--seconds 3] [--rounds 5] [--connections 16] [--stalled 300]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from web_server import BODY, COMMANDS, Client, Streams, load, middle, tree, views, wait_for

HANDLERS = ("django", "threaded_asgi", "a2wsgi")
VARIABLE = "REQUEST_HANDLER"
THREADS = 256
# Those of the dashboard that need neither tables nor templates, and one that is not written for asyncio.
MIDDLEWARE = [
    "fp8scope_dashboard.api.middleware.ApiErrors",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "request_handlers.synchronous",
]


def synchronous(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware that is a plain synchronous function."""

    def middleware(request: Any) -> Any:
        return get_response(request)

    return middleware


def make_application() -> Callable[..., Any]:
    """The application under test, in the handler that the environment selects from HANDLERS."""
    import django
    from django.conf import settings

    settings.configure(
        SECRET_KEY="benchmark",  # serves the loopback address for some seconds
        ALLOWED_HOSTS=["127.0.0.1"],
        ROOT_URLCONF=type("urls", (), {"urlpatterns": views()}),
        MIDDLEWARE=MIDDLEWARE,
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        STATIC_URL="/static/",
        DATABASES={"default": {"ENGINE": "django.db.backends.dummy"}},
    )
    django.setup()
    from django.core.asgi import get_asgi_application
    from django.core.wsgi import get_wsgi_application

    handler, from_django = os.environ[VARIABLE], get_asgi_application()
    if handler == "django":
        return from_django
    if handler == "threaded_asgi":
        from fp8scope_dashboard.edge.threaded_asgi import Handler

        return Handler()
    from_wsgi = importlib.import_module("a2wsgi").WSGIMiddleware(get_wsgi_application(), workers=THREADS)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def receive_message() -> Any:
            # a2wsgi asks for a coroutine; granian's own `receive` returns a future.
            return await receive()

        is_stream = scope["type"] != "http" or scope["path"] == "/events"
        await (from_django if is_stream else from_wsgi)(scope, receive_message, send)

    return application


async def stall(port: int, count: int) -> list[Client]:
    """Clients that have sent half of a body and then stall."""
    clients = [await Client(port).connect() for _ in range(count)]
    head = f"POST /post HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    for client in clients:
        client.writer.write(head + BODY[:1000])
        await client.writer.drain()
    return clients


async def measure(handler: str, options: argparse.Namespace) -> dict[str, float | None]:
    """Start a server with one handler, load it, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = COMMANDS["granian"].format(port=port, app="request_handlers:make_application").split()
    server = subprocess.Popen(
        [sys.executable, *command], cwd=Path(__file__).parent, env={**os.environ, VARIABLE: handler}
    )
    busy = functools.partial(load, port, options.connections, options.seconds)
    try:
        await wait_for(port)
        figures: dict[str, float | None] = {}
        figures |= await busy("get", "get", None)
        figures |= await busy("post", "post", BODY)
        streams = Streams()
        await streams.open(port, options.streams)
        figures |= await busy("get_beside_streams", "get", None)
        for task in streams.tasks:
            task.cancel()
        stalled = await stall(port, options.stalled)
        try:
            async with asyncio.timeout(10 + 3 * options.seconds):
                figures |= await busy("get_beside_stalled", "get", None)
        except TimeoutError:
            figures |= {"get_beside_stalled_per_second": 0.0, "get_beside_stalled_p99_ms": None}
        for client in stalled:
            client.writer.close()
    finally:
        for process in tree(server) if server.poll() is None else []:
            process.kill()
        server.wait()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--stalled", type=int, default=300)
    options = parser.parse_args()
    handlers = [name for name in HANDLERS if name != "a2wsgi" or importlib.util.find_spec("a2wsgi")]
    rounds = [{name: asyncio.run(measure(name, options)) for name in handlers} for _ in range(options.rounds)]
    figures = {name: middle([each[name] for each in rounds]) for name in handlers}
    print(json.dumps({"benchmark": "request_handlers", "cpus": os.cpu_count(), **vars(options), **figures}))


if __name__ == "__main__":
    main()
