"""The outbox: delivers every event to every channel of its project, at least once.

A delivery is a row that is written in the event's transaction. A worker claims it with an UPDATE that matches
only an unclaimed row, so only one worker sends it. The claim of a worker that died expires; the receiver may
then get the same event twice, with the same delivery id.
"""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta

from celery import current_app
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from fp8scope_dashboard.alerts.channels import CHANNELS, DeliveryError, Notice
from fp8scope_dashboard.alerts.models import Channel, Delivery, Event
from fp8scope_dashboard.runs.services import page_url

logger = logging.getLogger(__name__)

DELIVER = "fp8scope_dashboard.alerts.tasks.deliver"
# With pauses that double from 10 s, the last attempt is about 20 minutes after the first.
MOST_ATTEMPTS = 8
FIRST_PAUSE = timedelta(seconds=10)
# Must be longer than any attempt can take.
CLAIM_EXPIRES = timedelta(minutes=5)
DUE_AT_ONCE = 200
ERROR_LENGTH = 500


def enqueue(event: Event) -> None:
    """Write the event's deliveries in the current transaction and queue them after the commit."""
    for channel in Channel.objects.filter(project=event.run.project_id, enabled=True):
        delivery, created = Delivery.objects.get_or_create(event=event, channel=channel)
        if created:
            transaction.on_commit(lambda pk=delivery.pk: _send_soon(pk))  # type: ignore[misc]


def _send_soon(delivery_id: int) -> None:
    try:
        current_app.send_task(DELIVER, args=[delivery_id])
    except Exception as error:  # whatever Redis or Celery raises: the sweeper finds the row with `due`
        logger.warning("Delivery %d waits for the sweeper: %s.", delivery_id, type(error).__name__)


def due() -> list[int]:
    """Release expired claims and return the deliveries to send now, the longest overdue first."""
    now = timezone.now()
    unfinished = Delivery.objects.filter(delivered_at=None, failed_at=None)
    unfinished.filter(claimed_at__lt=now - CLAIM_EXPIRES).update(claimed_at=None)
    waiting = unfinished.filter(claimed_at=None, due_at__lte=now).order_by("due_at")
    return list(waiting.values_list("id", flat=True)[:DUE_AT_ONCE])


def deliver(delivery_id: int) -> bool:
    """Send one delivery unless it was sent, is being sent, or is not due. Returns whether it was sent now."""
    now = timezone.now()
    mine = Q(pk=delivery_id, claimed_at=None, delivered_at=None, failed_at=None, due_at__lte=now)
    if Delivery.objects.filter(mine).update(claimed_at=now, attempts=F("attempts") + 1) != 1:
        return False
    delivery = Delivery.objects.select_related("event__run__project", "channel").get(pk=delivery_id)
    try:
        if not delivery.channel.enabled:
            raise DeliveryError("The channel is switched off.", permanent=True)
        CHANNELS[delivery.channel.kind].send(delivery.channel.config, _notice(delivery))
    except DeliveryError as error:
        _failed(delivery, str(error), permanent=error.permanent)
        return False
    except Exception as error:  # a bug of a channel must not leave the row claimed
        # Without the error's text, which may hold a secret.
        frames = "".join(traceback.format_tb(error.__traceback__))
        logger.error("Delivery %d failed unexpectedly: %s.\n%s", delivery_id, type(error).__name__, frames)
        _failed(delivery, f"Unexpected {type(error).__name__}; see the worker's log.", permanent=False)
        return False
    Delivery.objects.filter(pk=delivery_id).update(
        delivered_at=timezone.now(), claimed_at=None, last_error=""
    )
    return True


def _failed(delivery: Delivery, reason: str, *, permanent: bool) -> None:
    now = timezone.now()
    over = permanent or delivery.attempts >= MOST_ATTEMPTS
    Delivery.objects.filter(pk=delivery.pk).update(
        claimed_at=None,
        last_error=reason[:ERROR_LENGTH],
        due_at=now + FIRST_PAUSE * 2 ** (delivery.attempts - 1),
        failed_at=now if over else None,
    )


def _notice(delivery: Delivery) -> Notice:
    event, run = delivery.event, delivery.event.run
    return Notice(
        delivery=delivery.pk,
        event=event.pk,
        kind=event.kind,
        severity=event.severity,
        state=event.state,
        message=event.message,
        onset_step=event.onset_step,
        step=event.step,
        value=event.value,
        threshold=event.threshold,
        opened_at=event.opened_at,
        project=run.project.slug,
        run=str(run.id),
        run_name=run.name,
        url=page_url(run),
        tensors=event.evidence.get("tensors", []),
    )
