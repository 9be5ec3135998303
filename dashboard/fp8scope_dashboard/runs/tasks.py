"""Celery tasks of the life cycle of runs."""

from celery import shared_task

from fp8scope_dashboard.runs import services


@shared_task  # type: ignore[untyped-decorator]
def mark_silent() -> None:
    """Mark runs without recent heartbeats as silent."""
    services.mark_silent()
