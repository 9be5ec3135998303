"""Deleting a run: hidden at once, then removed bit by bit.

A compacted run is a few thousand rows whatever its length, but their values have gigabytes, and a run that
was never compacted has a row for every message: so it goes in bounded transactions, each of which can be
killed. What is left of the run is its id (runs.models.DeletedRun), by which an agent that still sends is
turned away.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from uuid import UUID

from celery import current_app
from django.db import OperationalError, connection, models, transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import DeletedRun, Run
from fp8scope_dashboard.telemetry import storage
from fp8scope_dashboard.telemetry.locks import lock_run

# The name of the task in telemetry.tasks, which imports this module.
DELETE_RUN = "fp8scope_dashboard.telemetry.tasks.delete_run"
# Rows deleted in one transaction.
ROWS_AT_ONCE = 2_000
# From so many bytes on, PostgreSQL is asked at once to make the room usable again; below, it will by itself.
VACUUM_BYTES = 64 << 20
# How long that waits for who else works on a table; after that PostgreSQL does it by itself, later.
VACUUM_PATIENCE = "30s"


@dataclass(frozen=True)
class Progress:
    """How far a deletion is: bytes at its beginning, bytes still there. Both 0 when it is over."""

    total: int
    left: int
    done: bool

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return 1.0 if self.done else 1.0 - min(1.0, self.left / self.total) if self.total else 0.0


def begin(run: Run) -> Progress:
    """Hide a run and have it deleted by a job. Asking twice is asking once."""
    first = Run.objects.filter(pk=run.pk).update(deleted_at=timezone.now())
    size = storage.of_run(run.pk).bytes
    if first:
        Run.with_deleted.filter(pk=run.pk).update(deleted_bytes=size)
        run_changed(run.pk, run.project_id, "state")
        transaction.on_commit(lambda: Thread(target=_start_job, args=[run.pk], daemon=True).start())
    return Progress(size, size, done=False)


def progress_of(run_id: UUID, project: Project) -> Progress | None:
    """How far the deletion of a run of this project is; None where none was asked for."""
    run = Run.with_deleted.filter(pk=run_id, project=project).exclude(deleted_at=None).first()
    if run is not None:
        return Progress(run.deleted_bytes, storage.of_run(run_id).bytes, done=False)
    if DeletedRun.objects.filter(run_id=run_id, project=project).exists():
        return Progress(0, 0, done=True)
    return None


def unfinished(project: Project | None = None) -> list[Run]:
    """Runs that are being deleted, the oldest request first."""
    found = Run.with_deleted.exclude(deleted_at=None).order_by("deleted_at")
    return list(found if project is None else found.filter(project=project))


def delete_run(run_id: UUID) -> int:
    """Delete the data of a run that is marked as deleted, and the run. Returns the number of rows deleted.

    Safe to be killed and repeated, and by two workers at once: each transaction takes the run's lock.
    """
    run = Run.with_deleted.filter(pk=run_id).exclude(deleted_at=None).first()
    if run is None:
        return 0
    places = _partitions(run_id) if run.deleted_bytes >= VACUUM_BYTES else []
    rows = 0
    for model, column in storage.tables_of_runs():
        # What others refer to (an alert and its deliveries) is few, and goes with the run.
        if not model._meta.related_objects:
            while deleted := _delete_some(run_id, model, column):
                rows += deleted
    with transaction.atomic():
        lock_run(run_id, wait=True)
        DeletedRun.objects.get_or_create(run_id=run_id, defaults={"project_id": run.project_id})
        run.delete()
    _vacuum(places)
    return rows


@transaction.atomic
def _delete_some(run_id: UUID, model: type[models.Model], column: str) -> int:
    lock_run(run_id, wait=True)
    table = model._meta.db_table
    with connection.cursor() as cursor:
        # All rows of a run lie in one partition, so that a place (ctid) names one row.
        cursor.execute(
            f"""
            DELETE FROM "{table}" WHERE "{column}" = %s AND ctid = ANY(ARRAY(
                SELECT ctid FROM "{table}" WHERE "{column}" = %s LIMIT %s))
            """,
            [run_id, run_id, ROWS_AT_ONCE],
        )
        return int(cursor.rowcount)


def _partitions(run_id: UUID) -> list[str]:
    """The tables (partitions, where there are) that hold the run's rows."""
    found = []
    for model, column in storage.tables_of_runs():
        table = model._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(
                f'SELECT tableoid::regclass::text FROM "{table}" WHERE "{column}" = %s LIMIT 1', [run_id]
            )
            found += [name for (name,) in cursor.fetchall()]
    return found


def _vacuum(tables: list[str]) -> None:
    if connection.in_atomic_block:
        return
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = %s", [VACUUM_PATIENCE])
        try:
            for table in tables:
                # An autovacuum that is at it, which began before all was deleted, gives way.
                with suppress(OperationalError):
                    cursor.execute(f"VACUUM {table}")
        finally:
            cursor.execute("RESET lock_timeout")


def _start_job(run_id: UUID) -> None:
    # If Redis or Celery fails, the sweep finds the run by its mark.
    with suppress(Exception):
        current_app.send_task(DELETE_RUN, args=[str(run_id)])
