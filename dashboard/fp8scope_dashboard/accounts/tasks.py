"""Celery tasks of accounts."""

from celery import shared_task
from django.contrib.sessions.models import Session
from django.utils import timezone

PIECE = 1_000
MAX_PIECES = 100


@shared_task  # type: ignore[untyped-decorator]
def delete_expired_sessions() -> None:
    """Delete sessions that have expired, such as those of people who began to sign in and went away."""
    for _ in range(MAX_PIECES):
        expired = Session.objects.filter(expire_date__lt=timezone.now()).order_by("expire_date")
        keys = list(expired.values_list("pk", flat=True)[:PIECE])
        if not keys:
            return
        Session.objects.filter(pk__in=keys).delete()
