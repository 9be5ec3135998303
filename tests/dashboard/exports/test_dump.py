"""pg_dump and pg_restore, used as docs/operating.md describes, restore every table."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from dashboard.helpers.recorder import Recorder
from django.db import connection

from fp8scope_dashboard.embedded.postgres import DATABASE, EmbeddedPostgres
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import compaction

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def server() -> EmbeddedPostgres:
    if "FP8SCOPE_TEST_SERVERS" not in os.environ:
        pytest.skip("DATABASE_URL names a server whose programs are not ours")
    return EmbeddedPostgres(Path(os.environ["FP8SCOPE_TEST_SERVERS"]) / "postgres", durable=False)


def contents(url: str) -> dict[str, Any]:
    """The number of rows and a digest of the rows of each table."""
    tables = {}
    with psycopg.connect(url, autocommit=True) as source:
        names = source.execute(
            "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace"
            " AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
        ).fetchall()
        for (name,) in names:
            tables[name] = source.execute(
                f"SELECT count(*), md5(string_agg(md5(t::text), '' ORDER BY md5(t::text))) FROM {name} AS t"
            ).fetchone()
    return tables


def run(server: EmbeddedPostgres, program: str, *arguments: str) -> None:
    command = [
        str(server.program(program)),
        "--host",
        str(server.socket_dir),
        "--username",
        DATABASE,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_works(server: EmbeddedPostgres, tmp_path: Path) -> None:
    recorder = Recorder.of_new_run(["a.input", "b.input"])
    for begin in range(0, 400, 100):
        amax = np.random.default_rng(begin).normal(size=(100, 2))
        recorder.send(list(range(begin, begin + 100)), {"loss": [float("nan")] * 100}, {"amax": amax})
    Run.objects.update(state="finished")
    while compaction.compact_run(recorder.run.pk):
        pass
    recorder.send([400], {"loss": [1.0]})
    name = str(connection.settings_dict["NAME"])
    before = contents(server.database_url(name))
    assert before["telemetry_tile"][0] > 0 and before["telemetry_chunk"][0] == 1
    dump = tmp_path / "fp8scope.dump"
    run(server, "pg_dump", "--format=custom", "--file", str(dump), name)
    restored = f"{name}_restored"
    run(server, "createdb", restored)
    try:
        run(server, "pg_restore", "--exit-on-error", "--dbname", restored, str(dump))
        assert contents(server.database_url(restored)) == before
    finally:
        run(server, "dropdb", restored)
