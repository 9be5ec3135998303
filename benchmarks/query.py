"""Measure how long the data of a chart takes. Prints one JSON line.

An installation (`fp8scope up`) holds a run of `--tensors` x `--statistics` x `--steps` points (600 million by
default) and a run ten times longer with a tenth of the tensors (`--long-tensors` changes the number). Both
consist of resampled telemetry of a real FP8 training run (see store_fill.py), written by the encoders and the
roll-up code of the store.

Requests go over HTTP, one after the other, timed until the last byte:
- `series_ms_*`: one series as 2,000 points over all steps; another tensor and statistic each time.
- `heatmap_ms_*`: all tensors x 400 columns over all steps; another statistic each time, including rates.

p50 and p95 are warm: every request was made once before. For `cold`, PostgreSQL is restarted before each
request (empty shared buffers, warm system cache), and the web process first answers a request about another
run. `growth` compares p50 on the longer run with that on a run of `--steps` and as many tensors; it is the
larger of the two ratios.

    python benchmarks/query.py [--recording DIR] [--tensors 1000] [--steps 100000] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

STATISTICS = ("amax", "scale", "saturated", "underflow", "overflow_rate", "underflow_rate")
POINTS, COLUMNS = 2_000, 400


class Reader:
    """Sends requests to one installation over one connection."""

    def __init__(self, url: str, token: str) -> None:
        self._pool = urllib3.PoolManager(headers={"authorization": f"Bearer {token}"}, retries=20)
        self._url = url

    def get(self, path: str) -> float:
        """Return the milliseconds until the last byte."""
        begin = time.perf_counter()
        answer = self._pool.request("GET", self._url + path)
        took = (time.perf_counter() - begin) * 1000
        if answer.status != 200 or len(answer.data) < 500:
            raise SystemExit(f"{path}: {answer.status} {answer.data[:300]!r}")
        return took

    def series(self, run: dict[str, Any], i: int) -> float:
        """Request one series, a different one for each i."""
        index = i * 37 % run["tensors"]
        name = run["names"][index].replace("#", "%23")
        statistic = STATISTICS[i % len(STATISTICS)]
        return self.get(
            f"/api/v1/runs/{run['run']}/series?tensor={name}&statistic={statistic}&points={POINTS}"
        )

    def heatmap(self, run: dict[str, Any], i: int) -> float:
        """Request all tensors, with a different statistic for each i."""
        return self.get(
            f"/api/v1/runs/{run['run']}/heatmap?statistic={STATISTICS[i % len(STATISTICS)]}&columns={COLUMNS}"
        )


def fill(
    environment: dict[str, str], options: argparse.Namespace, tensors: int, steps: int
) -> dict[str, Any]:
    """Store a run, unless an earlier benchmark has stored it."""
    import psycopg

    name = f"{tensors} x {steps}"
    with psycopg.connect(environment["DATABASE_URL"], autocommit=True) as database:
        stored = database.execute(
            "SELECT id FROM runs_run JOIN telemetry_rolling ON run_id = id WHERE name = %s AND NOT pending",
            [name],
        ).fetchone()
        if stored is None:
            filler = str(Path(__file__).with_name("store_fill.py"))
            command = [sys.executable, filler, "--recording", str(options.recording),
                       "--tensors", str(tensors), "--steps", str(steps), "--name", name]  # fmt: skip
            surroundings = {**os.environ, **environment}
            done = subprocess.run(command, env=surroundings, check=True, stdout=subprocess.PIPE, text=True)
            stored = (json.loads(done.stdout)["run"],)
            for table in ("telemetry_tile", "telemetry_rollup", "telemetry_block"):
                database.execute(f"VACUUM ANALYZE {table}")
        rows = database.execute("SELECT name FROM runs_tensor WHERE run_id = %s ORDER BY index", [stored[0]])
        return {"run": str(stored[0]), "tensors": tensors, "names": [row[0] for row in rows]}


def measure(
    ask: Callable[[dict[str, Any], int], float], run: dict[str, Any], rounds: int
) -> dict[str, float]:
    """p50 and p95 of requests that were all made once before."""
    for i in range(len(STATISTICS)):
        ask(run, i)
    return quantiles([ask(run, i) for i in range(rounds)])


def measure_cold(
    supervisor: Any, reader: Reader, run: dict[str, Any], other: dict[str, Any], rounds: int
) -> dict[str, float]:
    """As `warm`, but with a restart of PostgreSQL before each pair of requests."""
    series, heatmaps = [], []
    for i in range(rounds):
        restart_postgres(supervisor)
        # Reconnects the web process and loads the catalogue of PostgreSQL.
        reader.series(other, i)
        series.append(reader.series(run, i))
        heatmaps.append(reader.heatmap(run, i))
    return {
        **{f"series_ms_{name}_cold": value for name, value in quantiles(series).items()},
        **{f"heatmap_ms_{name}_cold": value for name, value in quantiles(heatmaps).items()},
    }


def restart_postgres(supervisor: Any) -> None:
    """Ask PostgreSQL for a fast shutdown; the supervisor starts it again."""
    import signal

    import psycopg

    before = supervisor.pids()["postgres"]
    os.kill(before, signal.SIGINT)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            with psycopg.connect(supervisor.environment["DATABASE_URL"], connect_timeout=5) as database:
                database.execute("SELECT 1")
            if supervisor.pids().get("postgres") not in (None, before):
                return
        except (psycopg.Error, KeyError):
            continue
    raise SystemExit("PostgreSQL did not come back")


def quantiles(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {"p50": round(float(np.quantile(times, 0.5)), 1), "p95": round(float(np.quantile(times, 0.95)), 1)}


def main() -> None:
    """Measure, and print one JSON line."""
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    import store_data

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recording", type=Path, default=store_data.RECORDING, help="made when there is none"
    )
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--long-tensors", type=int, help="of the run ten times longer; default: a tenth")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cold-rounds", type=int, default=6)
    parser.add_argument(
        "--directory", type=Path, help="keeps the installation and its runs for the next time"
    )
    options = parser.parse_args()
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    options.recording.mkdir(parents=True, exist_ok=True)
    store_data.record(options.recording, 2400)
    few = options.long_tensors or max(1, options.tensors // 10)
    with (
        tempfile.TemporaryDirectory() as scratch,
        Supervisor(options.directory or Path(scratch) / "up", port=0) as supervisor,
    ):
        reader = Reader(supervisor.url, make_token(supervisor))
        environment = supervisor.environment
        wide = fill(environment, options, options.tensors, options.steps)
        short = fill(environment, options, few, options.steps)
        long = fill(environment, options, few, 10 * options.steps)
        figures: dict[str, Any] = {}
        growths = {}
        for kind, ask in (("series", reader.series), ("heatmap", reader.heatmap)):
            latencies = {name: measure(ask, run, options.rounds) for name, run in
                     (("wide", wide), ("short", short), ("long", long))}  # fmt: skip
            figures |= {f"{kind}_ms_{name}": value for name, value in latencies["wide"].items()}
            growths[kind] = round(latencies["long"]["p50"] / latencies["short"]["p50"], 2)
            figures |= {f"{kind}_ms_p50_{name}": latencies[name]["p50"] for name in ("short", "long")}
        figures |= measure_cold(supervisor, reader, wide, short, options.cold_rounds)
    print(
        json.dumps(
            {"benchmark": "query", "points": options.tensors * 6 * options.steps, **figures,
             "growth": max(growths.values()),
             "growths": growths, "long_run": {"tensors": few, "steps": 10 * options.steps}}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
