from celery import shared_task

from fp8scope_dashboard.runs import services


@shared_task  # type: ignore[untyped-decorator]
def mark_silent() -> None:
    """Runs whose processes have gone without a word become silent."""
    services.mark_silent()
