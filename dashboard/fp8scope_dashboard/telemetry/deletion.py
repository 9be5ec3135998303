"""Delete runs: hide the run at once, then delete its data in small transactions.

A compacted run has a few thousand rows of gigabytes in total, and a run without compaction one row per
message. So the data is deleted in bounded transactions, each of which may be killed. Only the id of the run
remains (runs.models.DeletedRun), so that an agent that still sends is refused.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from uuid import UUID

from celery import current_app
from django.db import OperationalError, connection, models, transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.media import services as media
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import DeletedRun, Run
from fp8scope_dashboard.telemetry import storage
from fp8scope_dashboard.telemetry.locks import lock_run

logger = logging.getLogger(__name__)

# The name of the task in telemetry.tasks, which imports this module.
DELETE_RUN = "fp8scope_dashboard.telemetry.tasks.delete_run"
# Rows deleted in one transaction.
ROWS_AT_ONCE = 2_000
# Vacuum after deleting at least this many bytes; below that, autovacuum is enough.
VACUUM_BYTES = 64 << 20
# How long the vacuum waits for the lock of a table; after that, it is left to autovacuum.
VACUUM_LOCK_TIMEOUT = "30s"


@dataclass(frozen=True)
class DeletionProgress:
    """Progress of a deletion: bytes at the beginning and bytes left, both 0 once it is done."""

    total: int
    left: int
    done: bool

    @property
    def share(self) -> float:
        """The deleted share, from 0 to 1."""
        return 1.0 if self.done else 1.0 - min(1.0, self.left / self.total) if self.total else 0.0


def begin(run: Run) -> DeletionProgress:
    """Hide a run and start a job that deletes it, without a way back. Idempotent."""
    first = Run.objects.filter(pk=run.pk).update(deleted_at=timezone.now())
    size = storage.of_run(run.pk).bytes
    if first:
        Run.with_deleted.filter(pk=run.pk).update(deleted_bytes=size)
        run_changed(run.pk, run.project_id, "state")
        transaction.on_commit(lambda: Thread(target=_start_job, args=[run.pk], daemon=True).start())
    return DeletionProgress(size, size, done=False)


def progress_of(run_id: UUID, project: Project) -> DeletionProgress | None:
    """Return the progress of deleting a run of this project; None if it is not being deleted."""
    run = Run.with_deleted.filter(pk=run_id, project=project).exclude(deleted_at=None).first()
    if run is not None:
        return DeletionProgress(run.deleted_bytes, storage.of_run(run_id).bytes, done=False)
    if DeletedRun.objects.filter(run_id=run_id, project=project).exists():
        return DeletionProgress(0, 0, done=True)
    return None


def unfinished(project: Project | None = None) -> list[Run]:
    """Return the runs whose data is being deleted, oldest request first."""
    runs = _to_erase().order_by("deleted_at")
    return list(runs if project is None else runs.filter(project=project))


def _to_erase() -> models.QuerySet[Run]:
    """The runs that are marked as deleted, without those whose deletion can be undone still."""
    undoable = models.Q(erase_at__gt=timezone.now())
    return Run.with_deleted.exclude(deleted_at=None).exclude(undoable)


def delete_run(run_id: UUID) -> int:
    """Delete a run that is marked as deleted, with its data. Returns the number of rows deleted.

    May be killed, repeated, and run by two workers concurrently: each transaction takes the lock of the run.
    """
    # From here on the deletion cannot be undone.
    if not _to_erase().filter(pk=run_id).update(erase_at=None):
        return 0
    run = Run.with_deleted.get(pk=run_id)
    if not run.deleted_bytes:
        run.deleted_bytes = storage.of_run(run_id).bytes
        Run.with_deleted.filter(pk=run_id).update(deleted_bytes=run.deleted_bytes)
    tables = _partitions(run_id) if run.deleted_bytes >= VACUUM_BYTES else []
    rows = 0
    for model, column in storage.tables_of_runs():
        # Tables with dependents, such as alerts, have few rows: they are deleted together with the run.
        if not model._meta.related_objects:
            while deleted := _delete_some(run_id, model, column):
                rows += deleted
    with transaction.atomic():
        lock_run(run_id, wait=True)
        DeletedRun.objects.get_or_create(run_id=run_id, defaults={"project_id": run.project_id})
        run.delete()
        media.delete_unnamed(run.project_id)
    _vacuum(tables)
    return rows


@transaction.atomic
def _delete_some(run_id: UUID, model: type[models.Model], column: str) -> int:
    lock_run(run_id, wait=True)
    table = model._meta.db_table
    with connection.cursor() as cursor:
        # All rows of a run are in one partition, so ctid is unique.
        cursor.execute(
            f"""
            DELETE FROM "{table}" WHERE "{column}" = %s AND ctid = ANY(ARRAY(
                SELECT ctid FROM "{table}" WHERE "{column}" = %s LIMIT %s))
            """,
            [run_id, run_id, ROWS_AT_ONCE],
        )
        return int(cursor.rowcount)


def _partitions(run_id: UUID) -> list[str]:
    """The tables, or their partitions, that hold rows of the run; other nodes have autovacuum."""
    partitions = []
    for model, column in storage.tables_of_runs():
        table = model._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(
                f'SELECT tableoid::regclass::text FROM "{table}" WHERE "{column}" = %s LIMIT 1', [run_id]
            )
            partitions += [name for (name,) in cursor.fetchall()]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NOT NULL", [partitions]
        )
        return [name for (name,) in cursor.fetchall()]


def _vacuum(tables: list[str]) -> None:
    if connection.in_atomic_block:
        return
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = %s", [VACUUM_LOCK_TIMEOUT])
        try:
            for table in tables:
                # Cancels a concurrent autovacuum, which began before everything was deleted.
                with suppress(OperationalError):
                    cursor.execute(f"VACUUM {table}")
        finally:
            cursor.execute("RESET lock_timeout")


def _start_job(run_id: UUID) -> None:
    try:
        current_app.send_task(DELETE_RUN, args=[str(run_id)])
    except Exception as error:  # whatever Redis or Celery raises: the sweep finds the run by its mark
        logger.warning("The deletion of run %s waits for the sweep: %s.", run_id, type(error).__name__)
