"""Measure the processor time of pages, where the limit is the server and not the browser.

    python benchmarks/page_cost.py [--only list run compare] [--rounds 10] [--runs 20000] [--tensors 2500]
                                   [--compared 60]

Prints one JSON line for each page: of the list of `--runs` runs without telemetry; of a run with the
telemetry of `--tensors` tensors, while it sends and when it has ended; of two groups of `--compared` runs
with telemetry.

    python_ms     processor time of this process for the page with its template
    postgres_ms   that of its database connection
    server_ms     their sum
    queries       number of database queries
    first         the same page when nothing of its runs is kept in Redis (`server_ms`)

All runs are in a database of this program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil

PARTS = ("list", "run", "compare")
LIST_PAGES = ("", "?page=200", "?sort=difference", "?by=group", "?q=precision:fp8", "charts/")
STEPS, TENSOR_STEPS = 2_000, 400
# Each first page is measured this often: the cache is emptied before.
FIRST_ROUNDS = 3


def list_pages(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The names and addresses of pages of a project with many runs."""
    from dashboard.helpers.many_runs import fill_project

    from fp8scope_dashboard.accounts.services import create_project

    fill_project(create_project("many", "Many runs"), options.runs)
    for page in LIST_PAGES:
        yield f"list of {options.runs} runs: {page or 'newest'}", f"/p/many/{page}"


def run_pages(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A run with many tensors, while it sends and when it has ended."""
    from dashboard.helpers.recording import Recorder, make_run

    from fp8scope_dashboard.accounts.services import create_project
    from fp8scope_dashboard.runs.models import Run

    project = create_project("large", "Large model")
    run = make_run(project, "fp8", precision="fp8", total_steps=STEPS)
    names = [f"layers.{i // 3}.mlp.linear{i % 3}.weight" for i in range(options.tensors)]
    writer = Recorder(run=run, tensors=names)
    chance = np.random.default_rng(0)
    steps = np.arange(TENSOR_STEPS)
    shape = (TENSOR_STEPS, len(names))
    statistics = {
        "amax": np.exp(0.1 * chance.standard_normal(shape)),
        "scale": np.full(shape, 64.0),
        "saturated": chance.poisson(0.02, shape).astype(float),
        "nonfinite": np.zeros(shape),
        "numel": np.full(shape, 1_000.0),
    }
    writer.rows(steps, {"loss": losses(chance, TENSOR_STEPS)}, statistics, rows_per_batch=50)
    address = f"/p/large/runs/{run.pk}/"
    yield f"run with {options.tensors} tensors, running", address
    writer.finish()
    settle(Run.objects.filter(pk=run.pk))
    yield f"run with {options.tensors} tensors, ended", address


def compare_pages(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Two groups of runs with telemetry, compared."""
    from dashboard.helpers.recording import Recorder, make_run

    from fp8scope_dashboard.accounts.services import create_project
    from fp8scope_dashboard.analysis.loss_comparisons import compare
    from fp8scope_dashboard.runs.models import Run

    project = create_project("seeds", "Seeds")
    chance = np.random.default_rng(1)
    for precision, baseline in (("bf16", ""), ("fp8", "bf16")):
        for seed in range(options.compared):
            fields = {"precision": precision, "group": precision, "baseline": baseline, "seed": seed}
            run = make_run(project, f"{precision} {seed}", total_steps=STEPS, config={"lr": 3e-4}, **fields)
            tensors = [f"blocks.{i}.weight" for i in range(12)] if baseline else []
            writer = Recorder(run=run, tensors=tensors)
            shape = (STEPS, len(tensors))
            statistics = {"amax": 1.0 + 0.1 * chance.random(shape), "scale": np.full(shape, 64.0)}
            scalars = {"loss": losses(chance, STEPS), "tokens": 4_096.0 * np.arange(1, STEPS + 1)}
            writer.rows(np.arange(STEPS), scalars, statistics if tensors else {}, rows_per_batch=500)
            writer.finish()
    runs = Run.objects.filter(project=project)
    for run in runs.filter(precision="fp8"):
        compare(run.pk)
    settle(runs)
    query = "&".join(f"runs={run.pk}" for run in runs)
    size = f"2 groups of {options.compared} runs"
    yield f"{size} compared", f"/p/seeds/compare/?{query}"
    yield f"{size}: losses", f"/p/seeds/compare/figures/loss.json?{query}"
    yield f"{size}: differences", f"/p/seeds/compare/figures/delta.json?{query}"


def losses(chance: np.random.Generator, steps: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A falling loss with noise, and the offset of a seed."""
    fall = 2.0 + 2.0 / np.sqrt(1.0 + np.arange(steps) / 18.0)
    return np.asarray(fall * (1.0 + 1e-3 * chance.standard_normal()) + 0.02 * chance.standard_normal(steps))


def settle(runs: Any) -> None:
    """Let these runs have ended an hour ago."""
    from django.utils import timezone

    runs.update(heartbeat_at=timezone.now() - timedelta(hours=1))


def measure(part: str, options: argparse.Namespace, client: Any) -> None:
    """Fill a project, and print a line for each of its pages."""
    from django.core.cache import cache
    from django.db import connection

    pages = {"list": list_pages, "run": run_pages, "compare": compare_pages}[part](options)
    for name, address in pages:
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")
        client.get(address)
        first = []
        for _ in range(FIRST_ROUNDS):
            cache.clear()
            first.append(measured(client, address, 1)["server_ms"])
        shown = {"benchmark": "page_cost", "page": name, **measured(client, address, options.rounds)}
        print(json.dumps(shown | {"first": round(sum(first) / len(first), 1)}), flush=True)


def measured(client: Any, address: str, rounds: int) -> dict[str, float]:
    """The figures of a page, as means over the rounds."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    backend = psutil.Process(connection.connection.info.backend_pid)
    before, began = backend.cpu_times(), time.process_time()
    for _ in range(rounds):
        assert client.get(address).status_code == 200
    spent, after = time.process_time() - began, backend.cpu_times()
    with CaptureQueriesContext(connection) as queries:
        client.get(address)
    database = after.user + after.system - before.user - before.system
    return {
        "python_ms": round(1e3 * spent / rounds, 1),
        "postgres_ms": round(1e3 * database / rounds, 1),
        "server_ms": round(1e3 * (spent + database) / rounds, 1),
        "queries": len(queries),
    }


def main() -> None:
    """Start PostgreSQL and Redis, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--tensors", type=int, default=2_500)
    parser.add_argument("--compared", type=int, default=60)
    options = parser.parse_args()
    from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
    from fp8scope_dashboard.embedded.redis import EmbeddedRedis

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="page-cost-")))
        os.environ["DATABASE_URL"] = stack.enter_context(EmbeddedPostgres(folder / "postgres"))
        os.environ["REDIS_URL"] = stack.enter_context(EmbeddedRedis(folder / "redis"))
        os.environ.update(
            DJANGO_SETTINGS_MODULE="fp8scope_dashboard.settings.test", FP8SCOPE_DATA_DIR=str(folder)
        )
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        from django.test import Client

        from fp8scope_dashboard.accounts.models import User

        client = Client(headers={"accept-encoding": "identity"})
        client.force_login(User.objects.create_superuser("root"))
        for part in options.only:
            measure(part, options, client)


if __name__ == "__main__":
    main()
