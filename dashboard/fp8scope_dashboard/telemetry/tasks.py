"""Celery tasks that compact, delete, expire and move the telemetry of runs."""

import logging
from uuid import UUID

from celery import shared_task
from django.conf import settings
from django.core.cache import cache

from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.telemetry import compaction, deletion, retention
from fp8scope_dashboard.telemetry.cold import files, moving

logger = logging.getLogger(__name__)

# The queue holds at most one compaction job per run. The mark that ensures this may be lost or left behind
# without harm: compaction itself is idempotent, and the sweep finds every run that still needs it.
MARK_SECONDS = 300
# As long as a job may take (CELERY_TASK_TIME_LIMIT) and wait.
MOVING_SECONDS = 1_200


@shared_task  # type: ignore[untyped-decorator]
def sweep_compaction() -> None:
    """Start a job for every run that needs compaction."""
    for run_id in compaction.runs_to_compact():
        if cache.add(_mark(run_id), 1, timeout=MARK_SECONDS):
            compact_run.delay(str(run_id))


@shared_task  # type: ignore[untyped-decorator]
def compact_run(run_id: str) -> None:
    """Compact part of a run. The rest is queued again, behind the jobs of other runs."""
    try:
        changes = compaction.compact_run(UUID(run_id))
    except ColdStoreError as error:
        # Late rows of old steps, whose roll-ups need old values. The next sweep tries again.
        logger.warning("Run %s is not compacted: %s", run_id, error)
        changes = 0
    if changes == compaction.CHANGES_AT_ONCE:
        cache.set(_mark(run_id), 1, timeout=MARK_SECONDS)
        compact_run.delay(run_id)
    else:
        cache.delete(_mark(run_id))


@shared_task(name=deletion.DELETE_RUN)  # type: ignore[untyped-decorator]
def delete_run(run_id: str) -> None:
    """Delete a run that is marked as deleted."""
    deletion.delete_run(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep_deletions() -> None:
    """Resume deletions whose message was lost or whose worker was killed."""
    for run in deletion.unfinished():
        delete_run.delay(str(run.pk))


@shared_task  # type: ignore[untyped-decorator]
def retain_run(run_id: str) -> None:
    """Delete the raw values that are older than the project of the run keeps them."""
    retention.retain_run(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep_retention() -> None:
    """Start a job for every run that holds raw values older than its project keeps them."""
    for run_id in retention.runs_due():
        retain_run.delay(str(run_id))


@shared_task  # type: ignore[untyped-decorator]
def move_run(run_id: str) -> None:
    """Move part of a run into the cold store. The rest is queued again, behind the jobs of other runs."""
    # An error of the store is that of the job: metrics count it, and the next sweep tries again.
    try:
        moved = moving.move_run(UUID(run_id))
    finally:
        cache.delete(_moving_mark(run_id))
    # Without progress, another worker moves the same values.
    if moved.bodies and not moved.is_all and cache.add(_moving_mark(run_id), 1, timeout=MOVING_SECONDS):
        move_run.delay(run_id)


@shared_task  # type: ignore[untyped-decorator]
def sweep_cold_store() -> None:
    """Delete files that nothing needs, and start a job for every run with values to move."""
    if settings.COLD_STORE is None:
        return
    files.delete_unneeded()
    for run_id in moving.runs_due():
        if cache.add(_moving_mark(run_id), 1, timeout=MOVING_SECONDS):
            move_run.delay(str(run_id))


def _mark(run_id: UUID | str) -> str:
    return f"compacting:{run_id}"


def _moving_mark(run_id: UUID | str) -> str:
    return f"moving:{run_id}"
