"""Celery's way in: parse ids, call a plain function."""

from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.analysis import lineage, services


@shared_task  # type: ignore[untyped-decorator]
def compare_run(run_id: str) -> None:
    """Bring the comparisons that a run takes part in up to date."""
    services.refresh(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start the comparisons that a lost message would have started."""
    for run_id in lineage.uncompared_runs():
        compare_run.delay(str(run_id))
