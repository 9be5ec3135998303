"""Celery tasks: each parses ids and calls a plain function."""

from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.analysis import lineage, services


@shared_task  # type: ignore[untyped-decorator]
def compare_run(run_id: str) -> None:
    """Update the comparisons that a run takes part in."""
    services.refresh(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start the comparisons whose Celery messages were lost."""
    for run_id in lineage.uncompared_runs():
        compare_run.delay(str(run_id))
