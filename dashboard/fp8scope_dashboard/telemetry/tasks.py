from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.telemetry import compaction


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start a job for every run that has chunks to merge."""
    for run_id in compaction.runs_to_compact():
        compact_run.delay(str(run_id))


@shared_task  # type: ignore[untyped-decorator]
def compact_run(run_id: str) -> None:
    """Merge a run's small chunks."""
    compaction.compact_run(UUID(run_id))
