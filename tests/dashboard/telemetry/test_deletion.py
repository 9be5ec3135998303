"""A deleted run is hidden at once and deleted in resumable steps, and its agent cannot create it again."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from dashboard.helpers.recorder import Recorder
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import DeletedRun, Run
from fp8scope_dashboard.telemetry import compaction, deletion, queries, storage, tasks
from fp8scope_dashboard.telemetry.models import Chunk

pytestmark = pytest.mark.django_db(transaction=True)

STEPS = 200
TENSORS = ("a.input", "b.input")


def recorded(batches: int = 20) -> Recorder:
    recorder = Recorder.of_new_run(TENSORS)
    rows = STEPS // batches
    for i in range(batches):
        steps = list(range(i * rows, (i + 1) * rows))
        values = np.random.default_rng(i).normal(size=(rows, 2))
        recorder.send(steps, {"loss": [1.0] * rows}, {"amax": values})
    return recorder


def rows_left(run: Run) -> dict[str, int]:
    """The number of rows of the run in each table with a run_id column, by the database's own catalog."""
    left = {}
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name FROM information_schema.columns "
            "WHERE column_name = 'run_id' AND table_schema = 'public'"
        )
        for (table,) in cursor.fetchall():
            cursor.execute(f'SELECT count(*) FROM "{table}" WHERE run_id = %s', [run.pk])
            left[table] = cursor.fetchone()[0]
    return {table: count for table, count in left.items() if count and table != "runs_deletedrun"}


def test_it_works() -> None:
    doomed, kept = recorded().run, recorded().run
    assert {"telemetry_chunk", "ingest_receipt", "runs_writer", "runs_tensor"} <= rows_left(doomed).keys()
    progress = deletion.begin(doomed)
    assert not progress.done and progress.total == progress.left > 0
    assert [run.pk for run in Run.objects.all()] == [kept.pk]
    assert deletion.delete_run(doomed.pk) > 20
    assert rows_left(doomed) == {}
    assert not Run.with_deleted.filter(pk=doomed.pk).exists()
    assert len(queries.scalar(kept.pk, "loss")) == STEPS
    assert deletion.delete_run(doomed.pk) == 0


def test_deletes_a_compacted_run() -> None:
    recorder = recorded()
    Run.objects.update(state="finished")
    while compaction.compact_run(recorder.run.pk):
        pass
    left = rows_left(recorder.run)
    assert {"telemetry_tile", "telemetry_block"} <= left.keys() and "telemetry_chunk" not in left
    deletion.begin(recorder.run)
    deletion.delete_run(recorder.run.pk)
    assert rows_left(recorder.run) == {}


def test_resumes_a_killed_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "ROWS_AT_ONCE", 3)
    run = recorded().run
    deletion.begin(run)
    whole = deletion._delete_some
    calls = 0

    def killed(*arguments: object) -> int:
        nonlocal calls
        if calls == 4:
            raise KeyboardInterrupt
        deleted = whole(*arguments)  # type: ignore[arg-type]
        # Tables without rows of the run come first or last, as their models do.
        calls += deleted > 0
        return deleted

    monkeypatch.setattr(deletion, "_delete_some", killed)
    with pytest.raises(KeyboardInterrupt):
        deletion.delete_run(run.pk)
    monkeypatch.undo()
    middle = deletion.progress_of(run.pk, run.project)
    assert middle is not None and not middle.done and 0 < middle.share < 1
    assert [each.pk for each in deletion.unfinished()] == [run.pk]
    tasks.delete_run(str(run.pk))
    assert rows_left(run) == {}
    done = deletion.progress_of(run.pk, run.project)
    assert done is not None and done.done and done.share == 1.0


def test_deletes_alerts_and_their_dependents() -> None:
    run = recorded().run
    Alert.objects.create(run=run, kind="loss_not_finite", severity="critical", step=1, onset_step=1)
    deletion.begin(run)
    deletion.delete_run(run.pk)
    assert not Alert.objects.exists() and not Receipt.objects.exists()


def test_a_deleted_run_cannot_be_registered_again() -> None:
    run = recorded().run
    deletion.begin(run)
    with pytest.raises(runs.RunDeletedError):
        runs.register(run.pk, run.project, {"name": "again"})
    deletion.delete_run(run.pk)
    with pytest.raises(runs.RunDeletedError):
        runs.register(run.pk, run.project, {"name": "again"})
    assert DeletedRun.objects.get().run_id == run.pk


def test_storage_measures_the_stored_rows() -> None:
    recorder = recorded()
    run = Run.objects.get()
    before = storage.of_run(run.pk, run.points_stored)
    stored = sum(len(body) for body in _bodies(run))
    assert before.tables["telemetry_chunk"][1] == 20
    assert stored < before.tables["telemetry_chunk"][0] < 1.05 * stored + 20 * 200
    assert before.bytes_per_point == before.bytes / (3 * STEPS)
    recorder.send([STEPS], {"loss": [1.0]}, {"amax": [[1.0, 2.0]]})
    assert storage.of_run(run.pk).bytes > before.bytes
    assert storage.of_run(run.pk).bytes_per_point is None


def _bodies(run: Run) -> list[bytes]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT body FROM telemetry_chunk WHERE run_id = %s", [run.pk])
        return [bytes(body) for (body,) in cursor.fetchall()]


@contextmanager
def held(tables: Iterable[str], seconds: float) -> Iterator[None]:
    """Hold the lock that autovacuum takes on these tables for some seconds."""
    locked = threading.Event()

    def hold() -> None:
        other = connections.create_connection("default")
        try:
            with transaction_of(other), other.cursor() as cursor:
                for table in tables:
                    cursor.execute(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE")
                locked.set()
                time.sleep(seconds)
        finally:
            other.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(60)
    yield
    thread.join()


@contextmanager
def transaction_of(other: BaseDatabaseWrapper) -> Iterator[None]:
    other.set_autocommit(False)
    try:
        yield
    finally:
        other.rollback()


def large() -> tuple[Run, list[str]]:
    """A run that is large enough for a vacuum after its deletion, and the partitions that hold its chunks."""
    run = recorded().run
    for seq in range(3):
        Chunk.objects.create(
            run=run, writer=uuid.uuid4(), seq=seq, last_seq=seq, first_step=0, last_step=1, rows=1, points=1,
            body=os.urandom(2 << 20),
        )  # fmt: skip
    return run, [table for table in deletion._partitions(run.pk) if table.startswith("telemetry_chunk")]


def bytes_of(tables: Iterable[str]) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(pg_total_relation_size(t::regclass)) FROM unnest(%s::text[]) AS t", [list(tables)]
        )
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize(("patience", "freed"), [("60s", True), ("10ms", False)])
def test_vacuums_after_a_large_deletion(monkeypatch: pytest.MonkeyPatch, patience: str, freed: bool) -> None:
    """It waits for another process that holds the table, but only until the lock timeout."""
    monkeypatch.setattr(deletion, "VACUUM_BYTES", 0)
    monkeypatch.setattr(deletion, "VACUUM_LOCK_TIMEOUT", patience)
    run, tables = large()
    deletion.begin(run)
    assert tables and bytes_of(tables) > 6 << 20
    with held(tables, 1.0):
        deletion.delete_run(run.pk)
    assert rows_left(run) == {}
    assert (bytes_of(tables) < 1 << 20) is freed
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)
