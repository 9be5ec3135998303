"""Celery tasks: each parses ids and calls a plain function."""

from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.diagnosis import services


@shared_task  # type: ignore[untyped-decorator]
def diagnose_run(run_id: str) -> None:
    """Diagnose a run."""
    services.diagnose(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start the diagnoses of runs in trouble."""
    for run_id in services.undiagnosed_runs():
        diagnose_run.delay(str(run_id))
