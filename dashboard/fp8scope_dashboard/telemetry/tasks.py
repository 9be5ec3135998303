"""Celery tasks that compact, delete and expire the telemetry of runs."""

from uuid import UUID

from celery import shared_task
from django.core.cache import cache

from fp8scope_dashboard.telemetry import compaction, deletion, retention

# The queue holds at most one compaction job per run. The mark that ensures this may be lost or left behind
# without harm: compaction itself is idempotent, and the sweep finds every run that still needs it.
MARK_SECONDS = 300


@shared_task  # type: ignore[untyped-decorator]
def sweep_compaction() -> None:
    """Start a job for every run that needs compaction."""
    for run_id in compaction.runs_to_compact():
        if cache.add(_mark(run_id), 1, timeout=MARK_SECONDS):
            compact_run.delay(str(run_id))


@shared_task  # type: ignore[untyped-decorator]
def compact_run(run_id: str) -> None:
    """Compact part of a run. The rest is queued again, behind the jobs of other runs."""
    if compaction.compact_run(UUID(run_id)) == compaction.CHANGES_AT_ONCE:
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


def _mark(run_id: UUID | str) -> str:
    return f"compacting:{run_id}"
