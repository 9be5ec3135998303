"""Measure ingest throughput: points per second that the server commits. Prints one JSON line.

A point is one number: one statistic of one tensor at one step. `--agents` processes, spread over `--runs`
runs, send rows of 1,000 tensors x 4 statistics over HTTP to a real installation (`fp8scope up`: web, worker,
PostgreSQL with fsync, Redis). Like the agent, each sends one message at a time, of up to 8 MiB of rows, and
waits for its acknowledgement. The result counts the points acknowledged within `--seconds` after a warm-up.
The senders share the cores of this machine.

The values resemble those of a run: amax is a random walk of float32, scales follow its history, and most
counts are zero. `points_per_s` sends bodies that are encoded beforehand, as if the senders were other
machines; `points_per_s_encoding` includes the encoding. `web_mb` is the memory of the web process at the
beginning and at the end.

The peers get the same numbers through their own clients: `bulk_log` of trackio with 4,000 metrics per row,
and `log_batch` of MLflow with its largest batch (1,000 metrics), sent to `trackio show` and `mlflow server`
(on SQLite).

    python benchmarks/ingest.py [--seconds 20] [--agents 4] [--runs 2] [--peers-venv DIR] [--no-peers]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

TENSORS = 1000
STATISTICS = ("numel", "amax", "scale", "underflow")
POINTS_A_ROW = TENSORS * len(STATISTICS)
WARM_UP = 3.0
PEERS = ("trackio", "mlflow")


def rows(count: int, seed: int) -> Any:
    """float64[count, TENSORS, STATISTICS] that resembles a run."""
    import numpy as np

    random = np.random.default_rng(seed)
    walk = random.normal(0, 0.02, (count, TENSORS)).cumsum(axis=0) + random.normal(0, 2, TENSORS)
    amax = np.exp(walk).astype(np.float32)
    history = np.maximum.accumulate(amax, axis=0)
    numel = np.broadcast_to(2.0 ** random.integers(14, 24, TENSORS), amax.shape)
    share = random.choice([0.0, 1e-6, 1e-3], TENSORS)
    return np.stack(
        [numel, amax, (448 / history).astype(np.float32), random.poisson(numel * share)], axis=2
    ).astype(np.float64)


class Agent:
    """A sending process: the encoder and transport of the agent, without training."""

    def __init__(self, url: str, token: str, run: str, rank: int, size: int | None) -> None:
        from fp8scope.config import Settings
        from fp8scope.delivery.transport import Transport
        from fp8scope.recording.records import Row, dump_json

        self.run, self.writer, self.seq, self.rank = run, str(uuid.uuid4()), 0, rank
        self.settings = Settings(url=url, token=token)
        self.transport = Transport(self.settings)
        self._row = Row
        self.size = size or max(1, self.settings.batch_bytes // (POINTS_A_ROW * 8))
        self.values = rows(max(4 * self.size, 500), rank)
        tensors = [
            {
                "name": f"layers.{i // 6}.linear{i % 6}.weight",
                "module": f"layers.{i // 6}.linear{i % 6}",
                "role": "weight",
                "format": "e4m3",
                "shape": [],
                "numel": 0,
            }
            for i in range(TENSORS)
        ]
        self.post("PUT", f"/runs/{run}", dump_json({"name": "ingest", "total_steps": 10**6}))
        catalogue = {"rank": rank, "hostname": "benchmark", "offset": 0, "tensors": tensors}
        self.post("POST", f"/runs/{run}/writers/{self.writer}/tensors", dump_json(catalogue))

    def post(self, method: str, path: str, body: bytes, kind: str = "application/json") -> Any:
        from fp8scope.delivery.transport import NextAction

        while True:
            outcome = self.transport.send(method, path, body, kind)
            if outcome.action is NextAction.DONE:
                return outcome.answer
            if outcome.action not in (NextAction.WAIT, NextAction.RETRY):
                raise SystemExit(f"refused: {outcome}")
            time.sleep(outcome.wait or 0.05)

    def encode(self) -> bytes:
        """The body of the next message."""
        from fp8scope.delivery.arrow_encoding import encode_batch

        begin = self.seq * self.size
        some = [
            self._row(
                step=begin + i,
                time_us=1_767_225_600_000_000 + begin + i,
                dropped=0,
                scalars={"loss": 1.0 / (1 + begin + i)},
                statistics=self.values[(begin + i) % len(self.values)],
            )
            for i in range(self.size)
        ]
        batch = encode_batch(some, STATISTICS, run=self.run, writer=self.writer, seq=self.seq)
        self.seq += 1
        return batch.body

    def send(self, body: bytes) -> int:
        """Send a message. Returns the points that the server acknowledged."""
        from fp8scope.delivery.arrow_encoding import CONTENT_TYPE

        answer = self.post("POST", f"/runs/{self.run}/batches", body, CONTENT_TYPE)
        assert answer["status"] == "stored", answer
        return int(answer["points"])


def work(
    agent: tuple[str, str, str, int], options: argparse.Namespace, encoding: bool, ready: Any, results: Any
) -> None:
    """Send for `seconds` once all processes are ready; puts (points, bytes, messages)."""
    me, seconds = Agent(*agent, options.rows), options.seconds
    # Enough bodies for ten times the goal; encoded before the clock begins.
    bodies = [] if encoding else [me.encode() for _ in range(int(20 + seconds * options.bodies))]
    ready.wait()
    begin, points, size, messages = time.monotonic(), 0, 0, 0
    while (now := time.monotonic()) < begin + WARM_UP + seconds:
        body = me.encode() if encoding else bodies.pop(0)
        stored = me.send(body)
        # Count only messages that are sent after the beginning and acknowledged before the end.
        if now >= begin + WARM_UP and time.monotonic() <= begin + WARM_UP + seconds:
            points, size, messages = points + stored, size + len(body), messages + 1
        encoding |= not bodies
    results.put((points, size, messages))


def measure(url: str, token: str, options: argparse.Namespace, encoding: bool, web: int) -> dict[str, Any]:
    """Run all agents concurrently. Also returns the resident memory of the web process, before and after."""
    import psutil

    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(options.agents + 1), context.Queue()
    runs = [str(uuid.uuid4()) for _ in range(options.runs)]
    agents = [
        context.Process(
            target=work,
            args=((url, token, runs[i % len(runs)], i), options, encoding, ready, results),
        )
        for i in range(options.agents)
    ]
    for agent in agents:
        agent.start()
    process = psutil.Process(web)
    ready.wait(120)
    time.sleep(WARM_UP)
    before, cpu = process.memory_info().rss / 1e6, sum(process.cpu_times()[:2])
    sent = [results.get(timeout=options.seconds + 120) for _ in agents]
    for agent in agents:
        agent.join()
    after, cpu = process.memory_info().rss / 1e6, sum(process.cpu_times()[:2]) - cpu
    points = sum(totals[0] for totals in sent)
    return {
        "points_per_s": round(points / options.seconds),
        "bytes_per_point_sent": round(sum(totals[1] for totals in sent) / max(1, points), 2),
        "messages_per_s": round(sum(totals[2] for totals in sent) / options.seconds, 1),
        "web_cpu_share": round(cpu / options.seconds, 2),
        "web_mb": [round(before), round(after)],
    }


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Start an installation and load it, first with prepared bodies, then while encoding."""
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        Supervisor(Path(directory) / "up", port=0) as supervisor,
    ):
        token = make_token(supervisor)
        first = measure(supervisor.url, token, options, False, supervisor.pids()["web"])
        second = measure(supervisor.url, token, options, True, supervisor.pids()["web"])
    return {**first, "points_per_s_encoding": second["points_per_s"], "web_mb_end": second["web_mb"][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rows", type=int, help="rows a message; default: as many as fit the agent's 8 MiB")
    parser.add_argument("--bodies", type=int, default=8, help="bodies made beforehand, per agent and second")
    parser.add_argument("--directory", type=Path, help="where the database lies while it runs")
    parser.add_argument("--peers-venv", type=Path, help="kept between runs; temporary by default")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    figures = ours(options)
    if not options.no_peers:
        import ingest_peers

        for peer, rate in ingest_peers.measure(options.peers_venv, options.seconds, options.agents).items():
            figures |= {
                f"{peer}_points_per_s": rate,
                f"over_{peer}": round(figures["points_per_s"] / rate, 1),
            }
    print(json.dumps({"benchmark": "ingest", "cpus": os.cpu_count(), **figures}))


if __name__ == "__main__":
    main()
