"""Measure the processor time of pages of the list of runs. Prints one JSON line for each page.

    python benchmarks/run_list.py [--runs 20000] [--rounds 20]

A project of runs without telemetry, in a database of its own. `python_ms` is the processor time of this
process for a page with its template, `postgres_ms` that of its database connection, `queries` their number.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

PAGES = ("", "?page=200", "?sort=difference", "?by=group", "?q=precision:fp8", "charts/")
SLUG = "many"


def pages(options: argparse.Namespace) -> None:
    """Fill the project, and measure its pages."""
    from django.core.management import call_command
    from django.db import connection
    from django.test import Client

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from dashboard.helpers.many_runs import fill_project

    from fp8scope_dashboard.accounts.models import User
    from fp8scope_dashboard.accounts.services import create_project

    call_command("migrate", verbosity=0)
    fill_project(create_project(SLUG, "Many runs"), options.runs)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    client = Client(headers={"accept-encoding": "identity"})
    client.force_login(User.objects.create_superuser("root"))
    for page in PAGES:
        print(
            json.dumps(
                {"page": page or "list", "runs": options.runs, **measured(client, page, options.rounds)}
            )
        )


def measured(client: Any, page: str, rounds: int) -> dict[str, float]:
    """The figures of a page, as means over the rounds."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    address = f"/p/{SLUG}/{page}"
    for _ in range(3):
        assert client.get(address).status_code == 200
    backend = psutil.Process(connection.connection.info.backend_pid)
    before, began = backend.cpu_times(), time.process_time()
    for _ in range(rounds):
        client.get(address)
    spent, after = time.process_time() - began, backend.cpu_times()
    with CaptureQueriesContext(connection) as queries:
        client.get(address)
    database = after.user + after.system - before.user - before.system
    return {
        "python_ms": round(1e3 * spent / rounds, 1),
        "postgres_ms": round(1e3 * database / rounds, 1),
        "queries": len(queries),
    }


def main() -> None:
    """Start PostgreSQL, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-list-")))
        os.environ["DATABASE_URL"] = stack.enter_context(EmbeddedPostgres(folder / "postgres"))
        os.environ.update(
            DJANGO_SETTINGS_MODULE="fp8scope_dashboard.settings.test", FP8SCOPE_DATA_DIR=str(folder)
        )
        import django

        django.setup()
        pages(options)


if __name__ == "__main__":
    main()
