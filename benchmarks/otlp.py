"""Measure the endpoint of OpenTelemetry's metrics beside the agent's own wire. Prints one JSON line.

One client sends to an installation (`fp8scope up`: web, worker, beat, PostgreSQL with fsync, Redis) for
`--seconds` with each protocol, one request after the other: `--metrics` gauges at `--steps` steps a request.
Bodies are made beforehand. `small` is a request as an exporter sends it: the gauges of one step. A point is
one value.

    python benchmarks/otlp.py [--seconds 10] [--metrics 50] [--steps 100]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import urllib3

NOW = 1_790_000_000 * 10**9
BODIES = 8_000
"""Steps that are prepared."""


def exports(metrics: int, steps: int, number: int) -> bytes:
    """A request with gauges at some steps."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    pair = resource.resource.attributes.add()
    pair.key, pair.value.string_value = "run.id", f"benchmark {metrics} {steps}"
    scope = resource.scope_metrics.add()
    for index in range(metrics):
        gauge = scope.metrics.add(name=f"metric.{index}").gauge
        for step in range(number * steps, (number + 1) * steps):
            point = gauge.data_points.add(as_double=step / 7, time_unix_nano=NOW + step * 1_000_000)
            attribute = point.attributes.add()
            attribute.key, attribute.value.int_value = "step", step
    body: bytes = request.SerializeToString()
    return body


def batches(run: str, writer: str, metrics: int, steps: int, number: int) -> bytes:
    """The same as a batch of the agent."""
    from fp8scope.delivery.arrow_encoding import encode_batch
    from fp8scope.recording.records import Row

    rows = [
        Row(
            step=step,
            time_us=NOW // 1000 + step * 1000,
            dropped=0,
            scalars={f"metric.{index}": step / 7 for index in range(metrics)},
            statistics=np.zeros((0, 0)),
        )
        for step in range(number * steps, (number + 1) * steps)
    ]
    return encode_batch(rows, (), run=run, writer=writer, seq=number).body


def rate(post: Callable[[bytes], None], bodies: list[bytes], seconds: float) -> float:
    """Requests per second. Each body is sent once: one that is repeated is not stored."""
    began, sent = time.perf_counter(), 0
    for body in bodies:
        if time.perf_counter() - began >= seconds:
            break
        post(body)
        sent += 1
    return sent / (time.perf_counter() - began)


def measure(url: str, token: str, metrics: int, steps: int, seconds: float) -> dict[str, int]:
    """Points per second of both protocols."""
    pool = urllib3.PoolManager(retries=False)
    run, writer = str(uuid.uuid4()), str(uuid.uuid4())
    head = {"Authorization": f"Bearer {token}"}

    def send(method: str, path: str, body: bytes, kind: str) -> None:
        while True:
            answer = pool.request(method, url + path, body=body, headers={**head, "Content-Type": kind})
            if answer.status != 429:
                break
            time.sleep(0.05)
        if answer.status not in (200, 201):
            raise SystemExit(f"{path}: {answer.status} {answer.data[:300]!r}")

    send("PUT", f"/api/v1/runs/{run}", b'{"name": "benchmark"}', "application/json")
    count = BODIES // steps if steps > 1 else BODIES
    ours = [batches(run, writer, metrics, steps, number) for number in range(count)]
    theirs = [exports(metrics, steps, number) for number in range(count)]
    arrow, per_request = "application/vnd.apache.arrow.stream", metrics * steps
    path = f"/api/v1/runs/{run}/batches"
    otlp = rate(
        lambda body: send("POST", "/otlp/v1/metrics", body, "application/x-protobuf"), theirs, seconds
    )
    agent = rate(lambda body: send("POST", path, body, arrow), ours, seconds)
    return {"otlp_points_per_s": round(otlp * per_request), "agent_points_per_s": round(agent * per_request)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--metrics", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory) / "up", port=0) as supervisor:
        token = make_token(supervisor)
        large = measure(supervisor.url, token, options.metrics, options.steps, options.seconds)
        small = measure(supervisor.url, token, options.metrics, 1, options.seconds)
    figures = {**large, **{f"small_{name}": value for name, value in small.items()}}
    print(json.dumps({"benchmark": "otlp", "cpus": os.cpu_count(), **figures}))


if __name__ == "__main__":
    main()
