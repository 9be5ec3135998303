"""Celery tasks: each parses ids and calls a plain function."""

from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.file_imports import job, services


@shared_task(name=services.RUN_IMPORT)  # type: ignore[untyped-decorator]
def run_import(job_id: str) -> None:
    """Run an import."""
    job.run(UUID(job_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Find the imports whose message was lost or whose worker was killed."""
    services.recover()
    job.remove_left_behind()
