"""Celery tasks: each calls a plain function."""

from typing import Final

from celery import shared_task
from django.core.cache import cache

from fp8scope_dashboard.sql_views import history, readers

MARK: Final = "copying_histories"
# A task that was killed leaves its mark behind until then.
MARK_SECONDS: Final = 600


@shared_task  # type: ignore[untyped-decorator]
def enforce_limits() -> None:
    """Keep logins within their limits."""
    readers.enforce_limits()


@shared_task  # type: ignore[untyped-decorator]
def copy_histories() -> None:
    """Copy the histories that are due; one worker at a time, because two would copy the same."""
    if cache.add(MARK, 1, timeout=MARK_SECONDS):
        try:
            history.copy_due()
        finally:
            cache.delete(MARK)
