"""Measure what reading by `fp8scope.Client` takes, against the pages. Prints one JSON line.

An installation (`fp8scope up`) holds a run of `--tensors` x 6 statistics x `--steps` points: 600 million with
`--tensors 1000 --steps 100000` (see store_fill.py). The same reading is done in three ways, in turn:

- `query_ms`: the function that the pages call, in this process.
- `page_ms`: the chart of the page, over HTTP, until its last byte.
- `client_ms`: the client, over HTTP, until its NumPy arrays are there.

Medians, warm. `to_query` and `to_page` are the client's median over theirs. The readings:

- `series`: one series as 1,200 points over all steps, as a chart has: a scalar.
- `tensor`: a statistic of a tensor as 2,000 points; another each time. Its chart has five, and is left out.
- `every_step`: every step of a statistic of a tensor, which no chart reads.
- `heatmap`: all tensors x 400 columns; another statistic each time.

    python benchmarks/client_query.py [--tensors 1000] [--steps 100000] [--directory DIR]
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
from statistics import median
from typing import Any
from uuid import UUID

import urllib3

STATISTICS = ("amax", "scale", "saturated", "underflow", "overflow_rate", "underflow_rate")
CHART_POINTS, POINTS, COLUMNS = 1_200, 2_000, 400
Reading = Callable[[int], object]


def fill(environment: dict[str, str], tensors: int, steps: int) -> str:
    """Store a run, unless an earlier benchmark has stored it; returns its id."""
    import psycopg

    name = f"client {tensors} x {steps}"
    with psycopg.connect(environment["DATABASE_URL"], autocommit=True) as database:
        stored = database.execute(
            "SELECT id FROM runs_run JOIN telemetry_rolling ON run_id = id WHERE name = %s AND NOT pending",
            [name],
        ).fetchone()
        if stored is not None:
            return str(stored[0])
        filler = str(Path(__file__).with_name("store_fill.py"))
        command = [sys.executable, filler, "--tensors", str(tensors), "--statistics", "6"]
        command += ["--steps", str(steps), "--name", name]
        surroundings = {**os.environ, **environment}
        done = subprocess.run(command, env=surroundings, check=True, stdout=subprocess.PIPE, text=True)
        for table in ("telemetry_tile", "telemetry_rollup", "telemetry_block"):
            database.execute(f"VACUUM ANALYZE {table}")
        return str(json.loads(done.stdout)["run"])


def in_turn(readings: dict[str, Reading], rounds: int) -> dict[str, float]:
    """Medians of readings in milliseconds, warm, in turn; and the client's over the others."""
    times: dict[str, list[float]] = {name: [] for name in readings}
    for i in range(-len(STATISTICS), rounds):
        for name, read in readings.items():
            began = time.perf_counter()
            read(i)
            if i >= 0:
                times[name].append(1_000 * (time.perf_counter() - began))
    medians = {name: median(taken) for name, taken in times.items()}
    ratios = {f"to_{name}": medians["client"] / ms for name, ms in medians.items() if name != "client"}
    return {
        **{f"{name}_ms": round(ms, 2) for name, ms in medians.items()},
        **{name: round(ratio, 2) for name, ratio in ratios.items()},
    }


class Page:
    """Charts of a run's page, as a signed-in browser asks for them."""

    def __init__(self, url: str, run_id: str) -> None:
        from django.test import Client as Browser

        from fp8scope_dashboard.accounts.models import Membership, Role, User
        from fp8scope_dashboard.runs.models import Run

        project = Run.objects.get(pk=run_id).project
        user = User.objects.filter(username="reader").first() or User.objects.create_user("reader")
        Membership.objects.get_or_create(user=user, project=project, defaults={"role": Role.VIEWER})
        browser = Browser()
        browser.force_login(user)
        cookies = "; ".join(f"{name}={morsel.value}" for name, morsel in browser.cookies.items())
        self._pool = urllib3.PoolManager(headers={"Cookie": cookies, "Accept-Encoding": "gzip"})
        self._address = f"{url}/p/{project.slug}/runs/{run_id}/figures"

    def chart(self, name: str, /, **query: str) -> bytes:
        """The JSON of a chart."""
        answer = self._pool.request("GET", f"{self._address}/{name}.json", fields=query, redirect=False)
        if answer.status != 200 or b'"figure"' not in answer.data[:100]:
            raise SystemExit(f"{name}: {answer.status} {answer.data[:300]!r}")
        return answer.data


def measure(url: str, token: str, run_id: str, rounds: int) -> dict[str, Any]:
    """The readings; needs Django's settings of the installation."""
    import fp8scope
    from fp8scope_dashboard.telemetry import queries

    run, key, page = fp8scope.Client(url, token).run(run_id), UUID(run_id), Page(url, run_id)
    names = [tensor.name for tensor in run.tensors()]

    def of(i: int) -> tuple[int, str]:
        return i * 37 % len(names), STATISTICS[i % len(STATISTICS)]

    def query_tensor(i: int) -> object:
        index, statistic = of(i)
        return queries.tensor_series(key, index, statistic, points=POINTS, timed=False)

    def client_tensor(i: int) -> object:
        index, statistic = of(i)
        return run.history(tensor=names[index], statistic=statistic, points=POINTS)

    series: dict[str, Reading] = {
        "query": lambda i: queries.scalar(key, "loss", points=CHART_POINTS, timed=False),
        "page": lambda i: page.chart("scalar", name="loss", smooth="0", marks="0"),
        "client": lambda i: run.history("loss", points=CHART_POINTS),
    }
    every_step: dict[str, Reading] = {
        "query": lambda i: queries.tensor_series(key, of(i)[0], "amax", timed=False),
        "client": lambda i: run.history(tensor=names[of(i)[0]], statistic="amax"),
    }
    heatmap: dict[str, Reading] = {
        "query": lambda i: queries.heatmap(key, of(i)[1], columns=COLUMNS),
        "page": lambda i: page.chart("heatmap", statistic=of(i)[1]),
        "client": lambda i: run.heatmap(of(i)[1], columns=COLUMNS),
    }
    return {
        "series": in_turn(series, rounds),
        "tensor": in_turn({"query": query_tensor, "client": client_tensor}, rounds),
        "every_step": in_turn(every_step, rounds),
        "heatmap": in_turn(heatmap, rounds),
    }


def main() -> None:
    """Measure, and print one JSON line."""
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensors", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--directory", type=Path, help="keeps the installation and its run for the next time")
    options = parser.parse_args()
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with (
        tempfile.TemporaryDirectory() as scratch,
        Supervisor(options.directory or Path(scratch) / "up", port=0) as supervisor,
    ):
        run = fill(supervisor.environment, options.tensors, options.steps)
        os.environ.update(supervisor.environment)
        import django

        django.setup()
        figures = measure(supervisor.url, make_token(supervisor), run, options.rounds)
    points = options.tensors * len(STATISTICS) * options.steps
    print(json.dumps({"benchmark": "client_query", "points": points, **figures}))


if __name__ == "__main__":
    main()
