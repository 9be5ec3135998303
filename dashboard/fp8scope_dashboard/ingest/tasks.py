"""Jobs of a run's life cycle: deletion and retention."""

from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.telemetry import deletion, retention


@shared_task  # type: ignore[untyped-decorator]
def delete_run(run_id: str) -> None:
    """Delete a run that is marked as deleted."""
    deletion.delete_run(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep_deletions() -> None:
    """Go on with deletions that a lost message or a killed worker left behind."""
    for run in deletion.unfinished():
        delete_run.delay(str(run.pk))


@shared_task  # type: ignore[untyped-decorator]
def retain_run(run_id: str) -> None:
    """Delete raw values that a run's project no longer keeps."""
    retention.retain_run(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep_retention() -> None:
    """Start a job for every run that holds raw values beyond its project's policy."""
    for run_id in retention.runs_due():
        retain_run.delay(str(run_id))
