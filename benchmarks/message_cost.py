"""CPU time that one small message costs the web process and PostgreSQL. Prints one JSON line.

    python benchmarks/message_cost.py [--seconds 10] [--rate 40] [--runs 10] [--steps 1 10] [--tensors 30 300]

Starts an installation (`fp8scope up`: web, worker, beat, PostgreSQL with fsync, Redis). `--runs` runs take
turns to send `--rate` messages a second in total: each has some steps with four statistics of each tensor and
ten scalars, encoded beforehand. A pair of `--steps` and `--tensors` is one load. The sender shares the cores.

    loads: steps, tensors, bytes      of one message
    web_ms, postgres_ms, redis_ms, jobs_ms
                                      CPU milliseconds of a message: of the web process, of PostgreSQL with
                                      all its processes, of Redis, of both workers and beat
    p50_ms, p99_ms                    from sending a message to its acknowledgement
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

from processor_time import cpu_seconds

STATISTICS = ("numel", "amax", "scale", "underflow")
SCALARS = 10
WARM_UP = 3.0


class Run:
    """One run with one writer, whose messages are sent over one connection of its own."""

    def __init__(self, port: int, token: str, tensors: int) -> None:
        self.id, self.writer, self.tensors = str(uuid.uuid4()), str(uuid.uuid4()), tensors
        self.connection = HTTPConnection("127.0.0.1", port)
        self.headers = {"Authorization": f"Bearer {token}"}

    def register(self) -> None:
        names = [f"layers.{i}.weight" for i in range(self.tensors)]
        described = [{"name": name, "module": name, "role": "weight", "format": "e4m3"} for name in names]
        catalogue = {"rank": 0, "hostname": "benchmark", "offset": 0, "tensors": described}
        self.request("PUT", f"/api/v1/runs/{self.id}", {"name": "cost", "total_steps": 10**6})
        self.request("POST", f"/api/v1/runs/{self.id}/writers/{self.writer}/tensors", catalogue)

    def request(self, method: str, path: str, document: dict[str, Any]) -> None:
        self._send(method, path, json.dumps(document).encode(), "application/json")

    def send(self, body: bytes) -> None:
        from fp8scope.delivery.arrow_encoding import CONTENT_TYPE

        self._send("POST", f"/api/v1/runs/{self.id}/batches?alerts_after=0", body, CONTENT_TYPE)

    def _send(self, method: str, path: str, body: bytes, kind: str) -> None:
        headers = {**self.headers, "Content-Type": kind}
        try:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, RemoteDisconnected):
            # The server closes a connection that was idle for some seconds; http.client opens another.
            self.connection.close()
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
        answer = response.read()
        if response.status not in (200, 201):
            raise SystemExit(f"{method} {path} was answered with {response.status}: {answer[:200]!r}")

    def bodies(self, count: int, steps: int) -> list[bytes]:
        """The bodies of the next messages, each of some steps."""
        import numpy as np

        from fp8scope.delivery.arrow_encoding import encode_batch
        from fp8scope.recording.records import Row

        random = np.random.default_rng(0)
        bodies = []
        for seq in range(count):
            rows = [
                Row(
                    step=seq * steps + step,
                    time_us=time.time_ns() // 1000,
                    dropped=0,
                    scalars={f"scalar{i}": float(value) for i, value in enumerate(random.random(SCALARS))},
                    statistics=random.random((self.tensors, len(STATISTICS))),
                )
                for step in range(steps)
            ]
            bodies.append(encode_batch(rows, STATISTICS, run=self.id, writer=self.writer, seq=seq).body)
        return bodies


def measure(supervisor: Any, token: str, steps: int, tensors: int, options: argparse.Namespace) -> Any:
    """The figures of one load."""
    runs = [Run(supervisor.port, token, tensors) for _ in range(options.runs)]
    each = int((options.seconds + WARM_UP) * options.rate / options.runs) + 1
    bodies = [run.bodies(each, steps) for run in runs]
    for run in runs:
        run.register()
    times: list[float] = []
    before: dict[str, float] = {}
    begin, sent = time.monotonic(), 0
    for number in range(each * options.runs):
        due = begin + number / options.rate
        time.sleep(max(0.0, due - time.monotonic()))
        if due - begin >= WARM_UP:
            before, sent = before or cpu_seconds(supervisor), sent + 1
        began = time.monotonic()
        runs[number % options.runs].send(bodies[number % options.runs][number // options.runs])
        if before:
            times.append(time.monotonic() - began)
    after = cpu_seconds(supervisor)
    took = {name: 1000 * (after[name] - before[name]) / sent for name in after}
    jobs = sum(value for name, value in took.items() if name not in ("web", "postgres", "redis"))
    times.sort()
    return {
        "steps": steps,
        "tensors": tensors,
        "bytes": len(bodies[0][0]),
        "messages": sent,
        "web_ms": round(took["web"], 2),
        "postgres_ms": round(took["postgres"], 2),
        "redis_ms": round(took["redis"], 2),
        "jobs_ms": round(jobs, 2),
        "p50_ms": round(1000 * times[len(times) // 2], 2),
        "p99_ms": round(1000 * times[int(0.99 * len(times))], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--tensors", type=int, nargs="+", default=[30, 300])
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory) / "up", port=0) as supervisor:
        token = make_token(supervisor)
        loads = [
            measure(supervisor, token, steps, tensors, options)
            for steps, tensors in zip(options.steps, options.tensors, strict=True)
        ]
    print(json.dumps({"benchmark": "message_cost", "cpus": os.cpu_count(), "loads": loads}))


if __name__ == "__main__":
    main()
