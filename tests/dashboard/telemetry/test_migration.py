"""Data of the first version moves into the partitioned tables and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dashboard.helpers.old_migrations import migrate, migrate_to
from dashboard.helpers.recorder import Recorder
from django.db import connection

from fp8scope_dashboard.runs.models import Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.models import Chunk

pytestmark = pytest.mark.django_db(transaction=True)

PARTITIONED = ("telemetry_chunk", "telemetry_block", "telemetry_tile", "telemetry_rollup")


@pytest.fixture
def back_at_the_end() -> Iterator[None]:
    yield
    migrate()


def is_partitioned(table: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT relkind = 'p' FROM pg_class WHERE oid = %s::regclass", [table])
        (partitioned,) = cursor.fetchone()
        return bool(partitioned)


def test_it_works(back_at_the_end: None) -> None:
    recorder = Recorder.of_new_run(["a"])
    for begin in (1, 4):
        recorder.send(range(begin, begin + 3), {"loss": [1.0, 2.0, 3.0]}, {"amax": [[1], [2], [3]]})
    run = recorder.run.id
    before = queries.scalar(run, "loss").steps.tolist()
    assert before == [1, 2, 3, 4, 5, 6]
    migrate_to(("telemetry", "0001_initial"))
    assert not is_partitioned("telemetry_chunk")
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(rows) FROM telemetry_chunk")
        assert cursor.fetchone() == (6,)
        # The first version did not store these columns.
        cursor.execute("UPDATE runs_writer SET first_step = NULL, last_step = NULL")
    migrate()
    assert all(is_partitioned(table) for table in PARTITIONED)
    assert Chunk.objects.count() == 2
    assert Writer.objects.values_list("first_step", "last_step").get() == (1, 6)
    assert queries.scalar(run, "loss").steps.tolist() == before
    assert queries.tensor_series(run, 0, "amax").values.tolist() == [1, 2, 3, 1, 2, 3]


def test_a_run_is_stored_in_one_partition() -> None:
    runs = [Recorder.of_new_run() for _ in range(12)]
    for recorder in runs:
        recorder.send([1], {"loss": [1.0]})
        recorder.send([2], {"loss": [1.0]})
    with connection.cursor() as cursor:
        cursor.execute("SELECT run_id, count(DISTINCT tableoid) FROM telemetry_chunk GROUP BY run_id")
        assert {count for _, count in cursor} == {1}
        cursor.execute("SELECT count(DISTINCT tableoid) FROM telemetry_chunk")
        (used,) = cursor.fetchone()
        assert used > 1
        # PostgreSQL scans only that partition.
        cursor.execute("EXPLAIN SELECT * FROM telemetry_chunk WHERE run_id = %s", [runs[0].run.id])
        assert len({word for (line,) in cursor for word in line.split() if "telemetry_chunk_p" in word}) <= 2
