"""The agents' latency while others flood the sign-in page or hold connections. Prints one JSON line.

    python benchmarks/signin_flood.py [--seconds 12] [--agents 60] [--connections 60] [--slow 900]
    python benchmarks/signin_flood.py --hostile-token [--seconds 12] [--rounds 3]

Starts an installation (PostgreSQL, Redis, web, worker, beat) on this machine. `--agents` agents each send one
small batch a second over a persistent connection.

alone: no other load.

    p50_s, p99_s     seconds from sending a batch to its acknowledgement

flood: `--connections` connections post a new name to the sign-in page as soon as the last post is answered.

    p99_ratio        p99 during the flood over `p99_s`
    flood_statuses   answers to these posts, by status

slow: `--slow` connections send a byte every 2 s, half of them within the headers and half within a body.
There are also 60 anonymous uploads of 31 MB.

    slow_p99_s       the agents' p99
    slow_left        slow connections that are still open at the end
    body_memory_mb   peak growth of the web process's memory
    body_files_mb    peak size of its open temporary files

With --hostile-token, only this load: `--connections` connections with a token of another project register
runs and send batches of `HOSTILE_ROWS` rows as soon as the last request is answered, whatever the answer.
`--rounds` times `--seconds` without this load alternate with as many with it.

    hostile_p50_ratio, hostile_p99_ratio   the agents' quantiles with it over those without it
    hostile_statuses                       answers to the hostile requests, by status

The flood runs in another process on the same cores, so that its work does not delay the agents' clocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

TENSORS, STATISTICS = 100, ("numel", "amax", "scale", "underflow")
WARM_UP = 4.0
SLOW_SECONDS = 18.0
UPLOADS, UPLOAD_BYTES = 60, 31_000_000
CSRF = "a" * 32
HOSTILE_ROWS = 100


class Connection:
    """A keep-alive HTTP/1.1 connection, reopened after the server has closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, path: str, headers: str, body: bytes = b"") -> int:
        """The answer's status. Raises OSError or EOFError if the connection ends without an answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        try:
            self._writer.write(head.encode() + body)
            lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            fields = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
            await self._reader.readexactly(int(fields.get(b"content-length", b"0")))
        except (OSError, EOFError):
            self.close()
            raise
        if fields.get(b"connection") == b"close":
            self.close()
        return int(lines[0].split()[1])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class Agent:
    """One training process: a run, a writer, and a batch of one step each second."""

    def __init__(self, port: int, token: str, rank: int) -> None:
        self.run, self.writer, self.rank, self.seq = str(uuid.uuid4()), str(uuid.uuid4()), rank, 0
        self.connection = Connection(port)
        self.headers = f"Authorization: Bearer {token}\r\n"

    async def register(self) -> None:
        names = [f"layers.{i}.weight" for i in range(TENSORS)]
        tensors = [{"name": name, "module": name, "role": "weight", "format": "e4m3"} for name in names]
        described = {"rank": 0, "hostname": "benchmark", "offset": 0, "tensors": tensors}
        for method, path, document in (
            ("PUT", f"/api/v1/runs/{self.run}", {"name": f"agent {self.rank}", "total_steps": 10**6}),
            ("POST", f"/api/v1/runs/{self.run}/writers/{self.writer}/tensors", described),
        ):
            headers = f"{self.headers}Content-Type: application/json\r\n"
            status = await self.connection.request(method, path, headers, json.dumps(document).encode())
            if status not in (200, 201):
                raise SystemExit(f"{method} {path} was answered with {status}")

    def batch(self) -> bytes:
        import numpy as np

        from fp8scope.delivery.arrow_encoding import encode_batch
        from fp8scope.recording.records import Row

        values = np.random.default_rng(self.seq).random((TENSORS, len(STATISTICS)))
        row = Row(
            step=self.seq,
            time_us=time.time_ns() // 1000,
            dropped=0,
            scalars={"loss": 1.0 / (1 + self.seq)},
            statistics=values,
        )
        batch = encode_batch([row], STATISTICS, run=self.run, writer=self.writer, seq=self.seq)
        self.seq += 1
        return batch.body

    async def send(self, until: float, times: list[float], statuses: Counter[int]) -> None:
        """Send a batch a second until `until`; append the seconds of each acknowledged batch to `times`."""
        from fp8scope.delivery.arrow_encoding import CONTENT_TYPE

        due = time.perf_counter() + (self.rank * 0.618) % 1
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            body, began, status = self.batch(), time.perf_counter(), 0
            # Like the real agent, repeat a message until it is acknowledged.
            while status not in (200, 201):
                with suppress(OSError, EOFError):
                    headers = f"{self.headers}Content-Type: {CONTENT_TYPE}\r\n"
                    path = f"/api/v1/runs/{self.run}/batches"
                    status = await self.connection.request("POST", path, headers, body)
                statuses[status] += 1
                if status not in (200, 201):
                    await asyncio.sleep(0.5)
            times.append(time.perf_counter() - began)
            due = max(due + 1, time.perf_counter())


async def load(agents: list[Agent], seconds: float) -> tuple[list[float], Counter[int]]:
    times: list[float] = []
    statuses: Counter[int] = Counter()
    until = time.perf_counter() + seconds
    await asyncio.gather(*(agent.send(until, times, statuses) for agent in agents))
    return times, statuses


async def flood(port: int, connections: int, seconds: float) -> Counter[int]:
    """Post new names over all connections; returns the number of answers by status (0: no answer)."""
    statuses: Counter[int] = Counter()
    until = time.perf_counter() + seconds

    async def attack(number: int) -> None:
        connection, attempt = Connection(port), 0
        headers = (
            f"Cookie: csrftoken={CSRF}\r\nX-CSRFToken: {CSRF}\r\n"
            "Content-Type: application/x-www-form-urlencoded\r\n"
        )
        while time.perf_counter() < until:
            attempt += 1
            name = f"name-{number}-{attempt}"
            body = urlencode({"username": name, "password": "wrong password"}).encode()
            status = 0
            with suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(max(0.1, until + 1 - time.perf_counter())):
                    status = await connection.request("POST", "/signin/", headers, body)
            statuses[status] += 1
        connection.close()

    await asyncio.gather(*(attack(number) for number in range(connections)))
    return statuses


async def abuse(port: int, token: str, connections: int, seconds: float) -> Counter[int]:
    """Register runs and send batches over all connections; returns the number of answers by status."""
    statuses: Counter[int] = Counter()
    until = time.perf_counter() + seconds

    async def attack() -> None:
        connection, run, writer, seq = Connection(port), str(uuid.uuid4()), str(uuid.uuid4()), 0
        headers = f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        register = ("PUT", f"/api/v1/runs/{run}", {"name": "hostile"})
        row = {"time": "2026-01-01T00:00:00Z", "scalars": {f"s{i}": float(i) for i in range(50)}}
        rows = [{**row, "step": step} for step in range(HOSTILE_ROWS)]
        message = {"protocol": 1, "writer": writer, "rows": rows}
        while time.perf_counter() < until:
            send = ("POST", f"/api/v1/runs/{run}/batches", {**message, "seq": seq})
            method, path, document = register if seq == 0 else send
            seq += 1
            status = 0
            with suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(max(0.1, until + 1 - time.perf_counter())):
                    status = await connection.request(method, path, headers, json.dumps(document).encode())
            statuses[status] += 1
        connection.close()

    await asyncio.gather(*(attack() for _ in range(connections)))
    return statuses


async def measure_hostile(port: int, token: str, hostile: str, options: argparse.Namespace) -> dict[str, Any]:
    agents = [Agent(port, token, rank) for rank in range(options.agents)]
    for agent in agents:
        await agent.register()
    await load(agents, WARM_UP)
    alone: list[float] = []
    under: list[float] = []
    refused: Counter[int] = Counter()
    statuses: Counter[int] = Counter()
    for _ in range(options.rounds):
        times, _ = await load(agents, options.seconds)
        alone += times
        attack = asyncio.create_task(
            in_process(abuse, port, hostile, options.connections, options.seconds + 2)
        )
        await asyncio.sleep(1.5)
        times, answered = await load(agents, options.seconds)
        under += times
        statuses += answered
        refused += await attack
        await asyncio.sleep(1)
    p50, p99 = percentile(alone, 0.5), percentile(alone, 0.99)
    return {
        "agents": options.agents,
        "rounds": options.rounds,
        "p50_s": round(p50, 4),
        "p99_s": round(p99, 4),
        "hostile_connections": options.connections,
        "hostile_p50_s": round(percentile(under, 0.5), 4),
        "hostile_p99_s": round(percentile(under, 0.99), 4),
        "hostile_p50_ratio": round(percentile(under, 0.5) / p50, 2),
        "hostile_p99_ratio": round(percentile(under, 0.99) / p99, 2),
        "hostile_statuses": dict(refused.most_common()),
        "agents_statuses": dict(statuses.most_common()),
    }


async def hold(port: int, slow: int, seconds: float) -> dict[str, Any]:
    """Hold slow connections and make large anonymous uploads; returns how they ended."""
    until = time.perf_counter() + seconds
    ended: Counter[str] = Counter()

    async def drip(number: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            ended["refused"] += 1
            return
        start = b"POST /signin/ HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
        if number % 2:
            start += b"1\r\nContent-Length: 50000\r\n\r\n"
        end = "left"
        with suppress(OSError):
            writer.write(start)
            while time.perf_counter() < until:
                with suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        if not await reader.read(65536):
                            end = "closed"
                            break
                writer.write(b"x")
        # A reset raises; what is left at the end is still open.
        if end == "left" and time.perf_counter() < until:
            end = "closed"
        ended[end] += 1
        writer.close()

    async def upload() -> None:
        piece, sent, answer = bytes(65536), 0, b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(max(0.1, until - time.perf_counter())):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                path = f"/api/v1/runs/{uuid.uuid4()}/batches"
                head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {UPLOAD_BYTES}\r\n\r\n"
                writer.write(head.encode())
                # All but the last bytes, so that the server has to hold the body.
                while sent < UPLOAD_BYTES - 1_000_000:
                    writer.write(piece)
                    sent += len(piece)
                    await writer.drain()
                answer = await reader.read(64)
        ended[f"upload {answer[9:12].decode() or 'cut or held'}"] += 1

    await asyncio.gather(*(drip(number) for number in range(slow)), *(upload() for _ in range(UPLOADS)))
    return dict(ended)


def run_into_queue(results: Any, work: Any, *arguments: Any) -> None:
    """The target of `in_process`: run a coroutine function and put its result into a queue."""
    results.put(asyncio.run(work(*arguments)))


async def in_process(work: Any, *arguments: Any) -> Any:
    """Run a load in another process, which has its own limit of open files."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=run_into_queue, args=(results, work, *arguments), daemon=True)
    process.start()
    try:
        return await asyncio.to_thread(results.get, True, 120)
    finally:
        process.join(10)


class Memory:
    """Peak memory of a process and peak size of its open temporary files, in MB."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.process = psutil.Process(pid)
        self.begin = self.peak = self.process.memory_info().rss / 1e6
        self.files = 0.0

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.process.memory_info().rss / 1e6)
            self.files = max(self.files, self._open_files() / 1e6)
            await asyncio.sleep(0.25)

    def _open_files(self) -> int:
        size, folder = 0, Path(f"/proc/{self.process.pid}/fd")
        with suppress(OSError):
            for entry in folder.iterdir():
                # An open temporary file has been unlinked.
                with suppress(OSError):
                    if os.readlink(entry).endswith("(deleted)"):
                        size += entry.stat().st_size
        return size


async def health(port: int, until: float) -> float:
    """Ask /healthz twice a second; returns the slowest answer in seconds."""

    def ask() -> float:
        began = time.perf_counter()
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        with suppress(OSError):
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                connection.close()
                return time.perf_counter() - began
        return 30.0

    slowest = 0.0
    while time.perf_counter() < until:
        slowest = max(slowest, await asyncio.to_thread(ask))
        await asyncio.sleep(0.5)
    return slowest


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(port: int, token: str, web: int, options: argparse.Namespace) -> dict[str, Any]:
    agents = [Agent(port, token, rank) for rank in range(options.agents)]
    for agent in agents:
        await agent.register()
    await load(agents, WARM_UP)
    alone, _ = await load(agents, options.seconds)
    attack = asyncio.create_task(in_process(flood, port, options.connections, options.seconds + 3))
    # The process with the flood needs a moment to start.
    await asyncio.sleep(1.5)
    probe = asyncio.create_task(health(port, time.perf_counter() + options.seconds))
    under, statuses = await load(agents, options.seconds)
    flooded, healthz = await attack, await probe
    await asyncio.sleep(2)
    memory = Memory(web)
    watching = asyncio.create_task(memory.watch())
    holding = asyncio.create_task(in_process(hold, port, options.slow, SLOW_SECONDS))
    await asyncio.sleep(1.5)
    slowed, _ = await load(agents, SLOW_SECONDS - 2)
    ended = await holding
    watching.cancel()
    p99 = percentile(alone, 0.99)
    return {
        "agents": options.agents,
        "p50_s": round(percentile(alone, 0.5), 4),
        "p99_s": round(p99, 4),
        "p99_ratio": round(percentile(under, 0.99) / p99, 2),
        "flood_connections": options.connections,
        "flood_p50_s": round(percentile(under, 0.5), 4),
        "flood_p99_s": round(percentile(under, 0.99), 4),
        "flood_statuses": dict(flooded.most_common()),
        "agents_statuses": dict(statuses.most_common()),
        "healthz_slowest_s": round(healthz, 3),
        "slow_connections": options.slow,
        "slow_p99_s": round(percentile(slowed, 0.99), 4),
        "slow_left": ended.pop("left", 0),
        "slow_ended": ended,
        "body_memory_mb": round(memory.peak - memory.begin),
        "body_files_mb": round(memory.files),
        "web_peak_mb": round(memory.peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each of the two loads")
    parser.add_argument("--agents", type=int, default=60)
    parser.add_argument("--connections", type=int, default=60)
    parser.add_argument("--slow", type=int, default=900)
    parser.add_argument("--hostile-token", action="store_true", help="only that load")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of loads with --hostile-token")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory) / "up", port=0) as supervisor:
        token, web = make_token(supervisor), supervisor.pids()["web"]
        if options.hostile_token:
            hostile = make_token(supervisor, "hostile")
            figures = asyncio.run(measure_hostile(supervisor.port, token, hostile, options))
        else:
            figures = asyncio.run(measure(supervisor.port, token, web, options))
    print(json.dumps({"benchmark": "signin_flood", "cpus": os.cpu_count(), **figures}))


if __name__ == "__main__":
    main()
