"""Compare the ASGI servers granian and uvicorn. Prints one JSON line.

Each serves the same small Django application from one worker process: a JSON answer (`get`), a 200 kB body
like an agent's (`post`), and `get` again beside 100 open server-sent event streams. `stop_seconds` is the
time from SIGTERM, with the streams still open and two seconds of grace, until every process has ended. The
figures are medians of `--rounds` rounds, in which the servers take turns.

    python benchmarks/web_server.py [--seconds 3] [--rounds 3] [--connections 16] [--streams 100]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

BODY = bytes(range(256)) * 800  # 204,800 bytes
EVENT_SECONDS = 0.5

COMMANDS = {
    "granian": "-m granian --interface asgi --host 127.0.0.1 --port {port} --workers 1 --no-log --factory"
    " --workers-kill-timeout 2 {app}",
    "uvicorn": "-m uvicorn --interface asgi3 --host 127.0.0.1 --port {port} --log-level critical --factory"
    " --timeout-graceful-shutdown 2 {app}",
}


def views() -> list[Any]:
    """URL patterns of the views under test: synchronous ones for data, an asynchronous one for events."""
    from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
    from django.urls import path

    def get(request: HttpRequest) -> HttpResponse:
        return JsonResponse({"run": 1, "points": list(range(50))})

    def post(request: HttpRequest) -> HttpResponse:
        return JsonResponse({"stored": len(request.body), "sha256": hashlib.sha256(request.body).hexdigest()})

    async def events(request: HttpRequest) -> StreamingHttpResponse:
        async def stream() -> AsyncIterator[bytes]:
            while True:
                yield b"event: points\ndata: {}\n\n"
                await asyncio.sleep(EVENT_SECONDS)

        return StreamingHttpResponse(stream(), content_type="text/event-stream")

    return [path("get", get), path("post", post), path("events", events)]


def make_application() -> Callable[..., Any]:
    """The Django application under test."""
    import django
    from django.conf import settings
    from django.core.asgi import get_asgi_application

    settings.configure(
        SECRET_KEY="benchmark",  # serves the loopback address for some seconds
        ALLOWED_HOSTS=["127.0.0.1"],
        ROOT_URLCONF=type("urls", (), {"urlpatterns": views()}),
        MIDDLEWARE=["django.middleware.common.CommonMiddleware"],
    )
    django.setup()
    return get_asgi_application()


class Client:
    """A keep-alive HTTP/1.1 connection, reduced to what the measurement needs."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def connect(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def request(self, path: str, body: bytes | None = None) -> bytes:
        """Send a request and read its whole answer. Raises RuntimeError if the status is not 200."""
        await self.send(path, body)
        headers = await self.headers()
        return await self.reader.readexactly(int(headers[b"content-length"]))

    async def send(self, path: str, body: bytes | None = None) -> None:
        method = "GET" if body is None else "POST"
        head = f"{method} /{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body or b'')}\r\n\r\n"
        self.writer.write(head.encode() + (body or b""))
        await self.writer.drain()

    async def headers(self) -> dict[bytes, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        if b" 200 " not in status:
            raise RuntimeError(f"unexpected answer: {status!r}")
        return {
            key.lower(): value.strip() for key, _, value in (line.partition(b":") for line in lines if line)
        }


async def load(
    port: int, connections: int, seconds: float, key: str, path: str, body: bytes | None
) -> dict[str, float]:
    """Keep `connections` busy for `seconds`: requests per second, and the 99th percentile in milliseconds."""
    latencies: list[float] = []
    stop = time.perf_counter() + seconds

    async def send_requests() -> None:
        client = await Client(port).connect()
        while (began := time.perf_counter()) < stop:
            answer = json.loads(await client.request(path, body))
            if body is not None and answer["stored"] != len(body):
                raise RuntimeError("the body did not arrive whole")
            latencies.append(time.perf_counter() - began)
        client.writer.close()

    await asyncio.gather(*(send_requests() for _ in range(connections)))
    return {
        f"{key}_per_second": len(latencies) / seconds,
        f"{key}_p99_ms": statistics.quantiles(latencies, n=100)[98] * 1e3,
    }


class Streams:
    """Open event streams, and the number of events that arrived on them."""

    def __init__(self) -> None:
        self.events = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, port: int, count: int) -> None:
        clients = [await Client(port).connect() for _ in range(count)]
        for client in clients:
            await client.send("events")
        for client in clients:
            await client.headers()
            self.tasks.append(asyncio.create_task(self._count(client)))

    async def _count(self, client: Client) -> None:
        while chunk := await client.reader.read(65536):
            self.events += chunk.count(b"event: points")


def tree(root: subprocess.Popen[bytes]) -> list[psutil.Process]:
    main = psutil.Process(root.pid)
    return [main, *main.children(recursive=True)]


def megabytes(root: subprocess.Popen[bytes]) -> float:
    """Proportional set size of the whole tree: shared pages are counted once."""
    return float(sum(process.memory_full_info().pss for process in tree(root)) / 1e6)


async def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            await (await Client(port).connect()).request("get")
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def measure(name: str, options: argparse.Namespace) -> dict[str, float | None]:
    """Start one server, load it, stop it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = COMMANDS[name].format(port=port, app="web_server:make_application").split()
    server = subprocess.Popen([sys.executable, *command], cwd=Path(__file__).parent)
    busy = functools.partial(load, port, options.connections, options.seconds)
    try:
        await wait_for(port)
        figures: dict[str, float | None] = {"processes": len(tree(server)), "mb_idle": megabytes(server)}
        figures |= await busy("get", "get", None)
        figures |= await busy("post", "post", BODY)
        streams = Streams()
        await streams.open(port, options.streams)
        before = streams.events
        figures |= await busy("get_beside_streams", "get", None)
        figures["events_per_second"] = (streams.events - before) / options.seconds
        figures["mb_with_streams"] = megabytes(server)
        figures["stop_seconds"] = await stop_time(server)
        await asyncio.gather(*streams.tasks, return_exceptions=True)
    finally:
        for process in tree(server) if server.poll() is None else []:
            process.kill()
        server.wait()
    return figures


async def stop_time(server: subprocess.Popen[bytes], limit: float = 20.0) -> float | None:
    """Seconds from SIGTERM until the whole tree has ended; None if that takes longer than `limit`."""
    processes, began = tree(server), time.perf_counter()
    server.send_signal(signal.SIGTERM)
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, limit)
    for process in alive:
        process.kill()
    return None if alive else time.perf_counter() - began


def middle(rounds: list[dict[str, float | None]]) -> dict[str, float | None]:
    """The median of each figure; None if a round has no value, such as for a server that did not stop."""
    result: dict[str, float | None] = {}
    for key in rounds[0]:
        values = [figure for figures in rounds if (figure := figures[key]) is not None]
        result[key] = round(statistics.median(values), 2) if len(values) == len(rounds) else None
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--streams", type=int, default=100)
    options = parser.parse_args()
    rounds = [{name: asyncio.run(measure(name, options)) for name in COMMANDS} for _ in range(options.rounds)]
    figures = {name: middle([figures[name] for figures in rounds]) for name in COMMANDS}
    print(json.dumps({"benchmark": "web_server", "cpus": os.cpu_count(), **vars(options), **figures}))


if __name__ == "__main__":
    main()
