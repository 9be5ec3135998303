"""Celery tasks of the audit log."""

from celery import shared_task

from fp8scope_dashboard.audit import queries

MAX_PIECES = 100


@shared_task  # type: ignore[untyped-decorator]
def delete_old() -> None:
    """Delete entries that are older than they are kept; the next hour goes on with what is left."""
    for _ in range(MAX_PIECES):
        if not queries.delete_old():
            return
