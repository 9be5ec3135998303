"""The register of files in the cold store, and the deletion of those that nothing needs.

A file is registered before it is written, and its row outlives the run. So a worker that is killed, and a
store that does not answer while a run is deleted, leave rows by which the next sweep finds the files.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from fp8scope_dashboard.cold_store.locations import DIGEST_BYTES, file_name
from fp8scope_dashboard.cold_store.object_store import object_store
from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.cold.tables import TABLES
from fp8scope_dashboard.telemetry.models import ColdFile, ColdFileState

# A worker is killed long before (CELERY_TASK_TIME_LIMIT), so that nobody writes a file for so long.
ABANDONED: Final = timedelta(hours=1)
# What has read the location of a body before it was brought back reads the file within this time.
GRACE: Final = timedelta(minutes=10)
# Files that one sweep deletes.
MAX_DELETED: Final = 500
RUNS_AT_ONCE: Final = 1_000


@transaction.atomic
def claim_file(run_id: UUID, digest: bytes, size: int, bodies: int) -> ColdFile | None:
    """Register a file that is about to be written; None if another worker writes it or has stored it."""
    now = timezone.now()
    file, is_new = ColdFile.objects.select_for_update().get_or_create(
        run_id=run_id,
        digest=digest,
        defaults={"bytes": size, "bodies": bodies, "state": ColdFileState.WRITING, "changed_at": now},
    )
    if is_new:
        return file
    is_written = file.state == ColdFileState.WRITING and file.changed_at > now - ABANDONED
    if file.state == ColdFileState.STORED or is_written:
        return None
    file.state, file.changed_at = ColdFileState.WRITING, now
    file.save(update_fields=["state", "changed_at"])
    return file


def is_claimed(file: ColdFile) -> bool:
    """Return whether the claim still holds, and keep it until the transaction ends."""
    mine = ColdFile.objects.filter(pk=file.pk, state=ColdFileState.WRITING, changed_at=file.changed_at)
    return mine.select_for_update().exists()


def settle_file(file: ColdFile, moved: int) -> None:
    """End a claim: the file is stored, or unneeded if nothing was moved into it."""
    file.state = ColdFileState.STORED if moved else ColdFileState.UNNEEDED
    file.bodies, file.changed_at = moved, timezone.now()
    file.save(update_fields=["state", "bodies", "changed_at"])


def release_files(run_id: UUID) -> None:
    """Mark the files of a run that no row refers to any more, within the transaction of the caller."""
    stored = ColdFile.objects.filter(run_id=run_id, state=ColdFileState.STORED)
    if not stored.exists():
        return
    used: set[bytes] = set()
    for table in TABLES:
        used.update(
            bytes(digest)
            for (digest,) in sql.fetch(
                f"""
                SELECT DISTINCT substring(location FROM 1 FOR {DIGEST_BYTES}) FROM {table.name}
                WHERE run_id = %(run)s AND location IS NOT NULL
                """,
                {"run": run_id},
                replica.PRIMARY,
            )
        )
    stored.exclude(digest__in=used).update(state=ColdFileState.UNNEEDED, changed_at=timezone.now())


def delete_unneeded() -> int:
    """Delete files of deleted runs, those that nothing refers to, and those of killed workers.

    Returns the number of deleted files.

    Raises:
        ColdStoreAwayError: the store does not answer.
    """
    _release_deleted_runs()
    unneeded = _unneeded(timezone.now())
    files = ColdFile.objects.filter(unneeded).order_by("changed_at")
    return sum(_delete(pk, unneeded) for pk in files.values_list("pk", flat=True)[:MAX_DELETED])


@transaction.atomic
def _delete(pk: int, unneeded: Q) -> bool:
    """Delete one file. Its row is locked meanwhile, so that nobody claims it."""
    file = ColdFile.objects.select_for_update(skip_locked=True).filter(unneeded, pk=pk).first()
    if file is None:
        return False
    object_store().delete(file_name(file.run_id, bytes(file.digest)))
    file.delete()
    return True


def _unneeded(now: datetime) -> Q:
    return Q(state=ColdFileState.UNNEEDED, changed_at__lt=now - GRACE) | Q(
        state=ColdFileState.WRITING, changed_at__lt=now - ABANDONED
    )


def _release_deleted_runs() -> None:
    """Mark the files of runs that are gone. In a distributed store runs cannot be joined with files."""
    stored = ColdFile.objects.filter(state=ColdFileState.STORED)
    run_ids = list(stored.order_by("run_id").values_list("run_id", flat=True).distinct())
    for begin in range(0, len(run_ids), RUNS_AT_ONCE):
        some = run_ids[begin : begin + RUNS_AT_ONCE]
        there = Run.with_deleted.filter(pk__in=some).values_list("pk", flat=True)
        gone = set(some) - set(there)
        if gone:
            stored.filter(run_id__in=gone).update(state=ColdFileState.UNNEEDED, changed_at=timezone.now())
