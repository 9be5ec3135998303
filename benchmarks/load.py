"""Load an installation for long, alone and beside floods. Prints one JSON line.

    python benchmarks/load.py [--seconds 600] [--agents 200] [--streams 20] [--processes 2]

Starts an installation (PostgreSQL, Redis, web, workers, beat) on this machine. `--agents` agents of
`signin_flood.py` each send a batch a second; `--streams` pages listen for server-sent events of their runs.
After `--seconds` alone, further loads join them for a tenth of that time each (at least 15 s): slow
connections with large anonymous uploads, a flood of the sign-in page, a token of another project that sends
as much as it can, and all three at once.

    acknowledged, lost, doubled    batches of one row; stored rows are compared run by run
    p50_s, p99_s, max_s            from sending a batch to its acknowledgement, agents alone
    p99_by_sixth_s                 p99 of each sixth of that time
    slow_, flood_, hostile_, all_  `p99_s` beside these loads, and `p99_ratio` over `p99_s` alone
    events, streams_reopened       what the streams received; how many had to be opened again while the
                                   agents were alone. Beside slow connections this is expected: all clients
                                   have one address, whose connections are limited
    memory_mb                      by process, with its children: medians of the second and the last sixth of
                                   the time alone. In the first sixth processes import what they need
    memory_mb_per_minute           the slope of a line through the last five sixths

The machine's cores are shared by everything, so times mean little while it does other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

WATCHED = ("web", "worker", "alerts", "beat", "redis", "postgres")
MIN_BESIDE_SECONDS = 15.0
SAMPLE_SECONDS = 1.0
SIXTHS = 6


def crowd(port: int, token: str, ranks: list[int], commands: Any, results: Any) -> None:
    """The target of a process with some of the agents: each number from `commands` is seconds of load."""
    asyncio.run(send_on_command(port, token, ranks, commands, results))


async def send_on_command(port: int, token: str, ranks: list[int], commands: Any, results: Any) -> None:
    import signin_flood

    agents = [signin_flood.Agent(port, token, rank) for rank in ranks]
    for agent in agents:
        await agent.register()
    results.put(None)
    while (seconds := await asyncio.to_thread(commands.get)) is not None:
        results.put(await signin_flood.load(agents, seconds))
    results.put({agent.run: agent.seq for agent in agents})


class Crowd:
    """All agents, spread over processes."""

    def __init__(self, port: int, token: str, agents: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands = [context.Queue() for _ in range(processes)]
        self._results = [context.Queue() for _ in range(processes)]
        for index, (commands, results) in enumerate(zip(self._commands, self._results, strict=True)):
            ranks = list(range(index, agents, processes))
            arguments = (port, token, ranks, commands, results)
            context.Process(target=crowd, args=arguments, daemon=True).start()
        self._answers(300.0)

    async def load(self, seconds: float) -> tuple[list[float], Counter[int]]:
        """Send for some seconds. Returns the seconds of each batch, and the answers by status."""
        self._tell(seconds)
        times: list[float] = []
        statuses: Counter[int] = Counter()
        for some, answered in await asyncio.to_thread(self._answers, seconds + 300.0):
            times += some
            statuses += answered
        return times, statuses

    def end(self) -> dict[str, int]:
        """Returns the number of acknowledged batches by run."""
        self._tell(None)
        return {run: count for counts in self._answers(60.0) for run, count in counts.items()}

    def _tell(self, seconds: float | None) -> None:
        for commands in self._commands:
            commands.put(seconds)

    def _answers(self, timeout: float) -> list[Any]:
        return [results.get(timeout=timeout) for results in self._results]


async def listen(port: int, address: str, cookie: str, counts: Counter[str]) -> None:
    """Listen for server-sent events until cancelled, and open the stream again when it ends."""
    while True:
        with suppress(OSError, EOFError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n"
            writer.write(head.encode())
            status = (await reader.readline()).split()[1:2]
            if status != [b"200"]:
                counts[f"status {b''.join(status).decode()}"] += 1
            while line := await reader.readline():
                counts["events"] += line.startswith(b"event:")
        counts["ended"] += 1
        await asyncio.sleep(1)


class MemoryLog:
    """The memory of processes with their children, in MB, sampled by a thread."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        """The memory between two moments, by process: medians of two sixths, and the slope."""
        sixth = (end - begin) / SIXTHS
        rest = [(when, memory) for when, memory in self.samples if begin + sixth <= when <= end]
        levels, slopes = {}, {}
        for name in self._pids:
            early = [memory[name] for when, memory in rest if when < begin + 2 * sixth]
            late = [memory[name] for when, memory in rest if when >= end - sixth]
            levels[name] = [round(statistics.median(early), 1), round(statistics.median(late), 1)]
            line = statistics.linear_regression(
                [when for when, _ in rest], [memory[name] for _, memory in rest]
            )
            slopes[name] = round(60 * line.slope, 2)
        return {"memory_mb": levels, "memory_mb_per_minute": slopes}

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            memory = {name: memory_of(pid) for name, pid in self._pids.items()}
            self.samples.append((time.perf_counter(), memory))


def memory_of(pid: int) -> float:
    """Private memory of a process and its children plus their share of common pages (PSS), in MB."""
    import psutil

    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for part in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                total += part.memory_full_info().pss
    return total / 1e6


def stored_rows(url: str, token: str, run: str) -> int:
    import urllib3

    headers = {"Authorization": f"Bearer {token}"}
    return int(
        urllib3.request("GET", f"{url}/api/v1/runs/{run}", headers=headers, timeout=60).json()["rows_stored"]
    )


async def measure(
    supervisor: Any, tokens: tuple[str, str], cookie: str, options: argparse.Namespace
) -> dict[str, Any]:
    import signin_flood
    from signin_flood import percentile

    port, (token, hostile) = supervisor.port, tokens
    agents = await asyncio.to_thread(Crowd, port, token, options.agents, options.processes)
    counts: Counter[str] = Counter()
    address = "/p/default/events"
    streams = [asyncio.create_task(listen(port, address, cookie, counts)) for _ in range(options.streams)]
    await agents.load(signin_flood.WARM_UP)
    pids = supervisor.pids()
    memory = MemoryLog({name: pids[name] for name in WATCHED if name in pids})
    began = time.perf_counter()
    alone: list[float] = []
    sixths = []
    statuses: Counter[int] = Counter()
    for _ in range(SIXTHS):
        times, answered = await agents.load(options.seconds / SIXTHS)
        alone += times
        statuses += answered
        sixths.append(round(percentile(times, 0.99), 4))
    ended = time.perf_counter()
    memory.stop()
    opened_again = counts["ended"]
    p99 = percentile(alone, 0.99)
    figures: dict[str, Any] = {
        "p50_s": round(percentile(alone, 0.5), 4),
        "p99_s": round(p99, 4),
        "max_s": round(max(alone), 4),
        "p99_by_sixth_s": sixths,
        "batches_per_s": round(len(alone) / (ended - began), 1),
        **memory.figures(began, ended),
    }
    seconds = max(MIN_BESIDE_SECONDS, options.seconds / 10)
    loads: dict[str, list[tuple[Any, ...]]] = {
        "slow": [(signin_flood.hold, port, options.slow, seconds + 2)],
        "flood": [(signin_flood.flood, port, options.connections, seconds + 2)],
        "hostile": [(signin_flood.abuse, port, hostile, options.connections, seconds + 2)],
    }
    loads["all"] = [job for jobs in tuple(loads.values()) for job in jobs]
    for name, jobs in loads.items():
        others = [asyncio.create_task(signin_flood.in_process(*job)) for job in jobs]
        # Their processes need a moment to start.
        await asyncio.sleep(2)
        times, answered = await agents.load(seconds)
        statuses += answered
        await asyncio.gather(*others)
        figures |= {
            f"{name}_p99_s": round(percentile(times, 0.99), 4),
            f"{name}_p99_ratio": round(percentile(times, 0.99) / p99, 2),
        }
    for stream in streams:
        stream.cancel()
    acknowledged = await asyncio.to_thread(agents.end)
    stored = {run: stored_rows(supervisor.url, token, run) for run in acknowledged}
    return {
        "acknowledged": sum(acknowledged.values()),
        "lost": sum(max(0, count - stored[run]) for run, count in acknowledged.items()),
        "doubled": sum(max(0, stored[run] - count) for run, count in acknowledged.items()),
        **figures,
        "statuses": dict(statuses.most_common()),
        "events": counts.pop("events", 0),
        "streams_reopened": opened_again,
        "streams_reopened_beside": counts.pop("ended", 0) - opened_again,
        **({"stream_failures": dict(counts)} if counts else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of the agents alone")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2, help="that the agents are spread over")
    parser.add_argument("--connections", type=int, default=60, help="of the flood, and of the hostile token")
    parser.add_argument("--slow", type=int, default=900, help="slow connections")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import growth
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory) / "up", port=0) as supervisor:
        tokens = make_token(supervisor), make_token(supervisor, "hostile")
        cookie = growth.python(growth.SIGN_IN, {**os.environ, **supervisor.environment})
        figures = asyncio.run(measure(supervisor, tokens, cookie, options))
    setting = {"cpus": os.cpu_count(), "agents": options.agents, "streams": options.streams}
    print(json.dumps({"benchmark": "load", **setting, "seconds": options.seconds, **figures}))


if __name__ == "__main__":
    main()
