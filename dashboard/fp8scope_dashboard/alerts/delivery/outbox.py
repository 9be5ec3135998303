"""The outbox: sends every alert to every channel that wants it, at least once.

A delivery is a row that is written in the alert's transaction. A worker claims it while it holds the
channel's row, so only one worker sends it, and the channel's limit is exact. The claim of a worker that died
expires; the receiver may then get the same message twice, with the same key.

Above its limit of messages in a minute, a channel's deliveries wait for the end of the minute. Then they are
sent with one of them, their leader, as one message: a digest. Its members never change after the first
attempt, because its key does not change either. For the same reason a delivery that was attempted alone never
becomes part of a digest.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from threading import BoundedSemaphore, Thread
from typing import Any
from uuid import uuid4

from celery import current_app
from django.db import DatabaseError, connection, connections, transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from fp8scope_dashboard.alerts.channels import CHANNELS, DeliveryError
from fp8scope_dashboard.alerts.delivery import message
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery, Reason, Severity
from fp8scope_dashboard.db.encryption import UnreadableSecretError
from fp8scope_dashboard.instrumentation import metrics

logger = logging.getLogger(__name__)

DELIVER = "fp8scope_dashboard.alerts.tasks.deliver"
# With pauses that double from 10 s, the last attempt is about 20 minutes after the first.
MAX_ATTEMPTS = 8
FIRST_PAUSE = timedelta(seconds=10)
# An attempt that takes longer is killed; a claim that is older belongs to a dead worker.
ATTEMPT_SECONDS = 60
CLAIM_EXPIRES = timedelta(seconds=90)
DUE_AT_ONCE = 200
ERROR_LENGTH = 500
# A channel's limit counts the messages of one minute.
MINUTE = timedelta(seconds=60)
MAX_IN_DIGEST = 100
# A notice that an alert ended waits for the notice that it began, and looks again after this pause.
ORDER_PAUSE = timedelta(seconds=10)

# Threads of one process that send.
MAX_AT_ONCE = 4

UNFINISHED = Q(delivered_at=None, failed_at=None)


class _SendingMode(threading.local):
    sends_at_once = False


_current = _SendingMode()
_at_once = BoundedSemaphore(MAX_AT_ONCE)


def enqueue(
    alert: Alert,
    channels: Collection[Channel] | None = None,
    reason: Reason = Reason.OPENED,
    occurrence: int = 0,
    due_at: datetime | None = None,
) -> None:
    """Write deliveries of an alert in the current transaction and queue them after the commit.

    Calling it again with the same arguments changes nothing.

    Args:
        channels: those to choose from; by default all of the project. Channels that are switched off, or want
            only more severe alerts, get nothing; an escalation goes to its channels whatever the severity.
        reason: a resolved notice goes only to channels that want them and were sent another notice of the
            alert.
        occurrence: a number that differs each time the same reason occurs again, e.g. the second reopening.
        due_at: when to send, e.g. at the end of quiet hours; by default now.
    """
    if channels is None:
        channels = Channel.objects.filter(project=alert.run.project_id)
    notified: set[int] = set()
    if reason == Reason.RESOLVED:
        notified = set(Delivery.objects.filter(event=alert).values_list("channel_id", flat=True))
    wanting = [
        channel for channel in channels if _wants(channel, alert, reason, was_notified=channel.pk in notified)
    ]
    new = [
        (alert.pk, channel.pk, reason, occurrence, uuid4(), due_at or timezone.now()) for channel in wanting
    ]
    for delivery_id in _insert(new):
        if due_at is None:
            _send_after_commit(delivery_id)


def _insert(deliveries: Collection[tuple[Any, ...]]) -> list[int]:
    """Insert the deliveries that do not exist, in one statement. Returns the ids of the new ones."""
    if not deliveries:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO alerts_delivery
                (event_id, channel_id, reason, occurrence, key, due_at, held, attempts, last_error)
            VALUES {", ".join(["(%s, %s, %s, %s, %s, %s, false, 0, '')"] * len(deliveries))}
            ON CONFLICT (event_id, channel_id, reason, occurrence) DO NOTHING RETURNING id
            """,
            [value for delivery in deliveries for value in delivery],
        )
        return [delivery_id for (delivery_id,) in cursor.fetchall()]


def enqueue_test(channel: Channel) -> Delivery:
    """Queue a test of a channel. It is attempted once; the delivery has the result."""
    with transaction.atomic():
        Delivery.objects.filter(channel=channel, reason=Reason.TEST).delete()
        delivery = Delivery.objects.create(channel=channel, reason=Reason.TEST)
        _send_after_commit(delivery.pk)
    return delivery


def send_again(deliveries: Collection[Delivery]) -> int:
    """Queue deliveries that failed for good, with their keys; returns how many messages will be sent."""
    leaders = {delivery.leader_id or delivery.pk for delivery in deliveries}
    with transaction.atomic():
        failed = Delivery.objects.filter(pk__in=leaders, delivered_at=None).exclude(failed_at=None)
        again = list(failed.select_for_update())
        ids = [delivery.pk for delivery in again]
        Delivery.objects.filter(Q(pk__in=ids) | Q(leader__in=ids), delivered_at=None).update(
            failed_at=None, attempts=0, due_at=timezone.now(), claimed_at=None
        )
        # It has been attempted: it must stay the message that it was.
        Delivery.objects.filter(pk__in=ids).update(held=False)
        for delivery in again:
            _send_after_commit(delivery.pk)
    return len(again)


def due() -> list[int]:
    """Release expired claims and return the deliveries to send now, the longest overdue first."""
    now = timezone.now()
    expired = Delivery.objects.filter(UNFINISHED, claimed_at__lt=now - CLAIM_EXPIRES)
    for delivery in expired.filter(Q(attempts__gte=MAX_ATTEMPTS) | Q(reason=Reason.TEST)):
        _failed(delivery, "The attempt did not end: its worker was killed.", permanent=True)
    expired.update(claimed_at=None)
    waiting = Delivery.objects.filter(UNFINISHED, claimed_at=None, leader=None, due_at__lte=now)
    return list(waiting.order_by("due_at", "id").values_list("id", flat=True)[:DUE_AT_ONCE])


def deliver(delivery_id: int) -> bool:
    """Send one delivery unless it was sent, is being sent, or is not due. Returns whether it was sent now."""
    delivery = _claim(delivery_id)
    if delivery is None:
        return False
    try:
        if not delivery.channel.enabled:
            raise DeliveryError("The channel is switched off.", permanent=True)
        CHANNELS[delivery.channel.kind].send(delivery.channel.config, message.compose(delivery))
    except DeliveryError as error:
        _failed(delivery, str(error), permanent=error.permanent, retry_after=error.retry_after)
        return False
    except UnreadableSecretError:
        _failed(
            delivery,
            "The channel's settings were encrypted with another secret key. Restore FP8SCOPE_SECRET_KEY, or "
            "enter the settings again.",
            permanent=False,
        )
        return False
    except Exception as error:  # a bug of a channel must not leave the row claimed
        # Without the error's text, which may hold a secret.
        frames = "".join(traceback.format_tb(error.__traceback__))
        logger.error("Delivery %d failed unexpectedly: %s.\n%s", delivery_id, type(error).__name__, frames)
        _failed(delivery, f"Unexpected {type(error).__name__}; see the worker's log.", permanent=False)
        return False
    _message_of(delivery).update(delivered_at=timezone.now(), failed_at=None, claimed_at=None, last_error="")
    metrics.DELIVERIES.add(delivery.channel.kind, "sent")
    return True


def _wants(channel: Channel, alert: Alert, reason: Reason, *, was_notified: bool) -> bool:
    if not channel.enabled:
        return False
    if reason == Reason.ESCALATED:
        return True
    if reason == Reason.RESOLVED and not (channel.send_resolved and was_notified):
        return False
    # In ascending order.
    severities = list(Severity.values)
    return severities.index(alert.severity) >= severities.index(channel.least_severity)


@contextmanager
def sending_at_once() -> Iterator[None]:
    """Send what this thread enqueues from this process, right after the commit, instead of by another task.

    Only the first attempts, and only MAX_AT_ONCE at a time; all others take the usual way. Nobody waits for
    them: if the process ends, the outbox still has the rows.
    """
    before, _current.sends_at_once = _current.sends_at_once, True
    try:
        yield
    finally:
        _current.sends_at_once = before


def _send_after_commit(delivery_id: int) -> None:
    transaction.on_commit(lambda: _send_soon(delivery_id))


def _send_soon(delivery_id: int) -> None:
    if _current.sends_at_once and _at_once.acquire(blocking=False):
        # A daemon, so that a slow receiver does not keep the process from ending.
        Thread(target=_deliver_and_release, args=(delivery_id,), name="fp8scope-deliver", daemon=True).start()
        return
    try:
        current_app.send_task(DELIVER, args=[delivery_id])
    except Exception as error:  # whatever Redis or Celery raises: the sweeper finds the row with `due`
        logger.warning("Delivery %d waits for the sweeper: %s.", delivery_id, type(error).__name__)


def _deliver_and_release(delivery_id: int) -> None:
    try:
        deliver(delivery_id)
    except DatabaseError as error:
        logger.warning("Delivery %d waits for the sweeper: %s.", delivery_id, type(error).__name__)
    finally:
        # The thread's connections go back to the pool.
        connections.close_all()
        _at_once.release()


@transaction.atomic
def _claim(delivery_id: int) -> Delivery | None:
    """Claim a delivery, with those that it sends as a digest; None if it cannot be sent now."""
    # NO KEY: so as not to wait for transactions that write deliveries, e.g. a long evaluation.
    locking = Channel.objects.select_for_update(of=("self",), no_key=True)
    channel = locking.select_related("project").filter(deliveries=delivery_id).first()
    now = timezone.now()
    ready = Delivery.objects.filter(
        UNFINISHED, channel=channel, claimed_at=None, leader=None, due_at__lte=now
    )
    delivery = ready.select_related("event__run__project").filter(pk=delivery_id).first()
    if channel is None or delivery is None:
        return None
    if _waits_for_its_opening(delivery):
        ready.filter(pk=delivery_id).update(due_at=now + ORDER_PAUSE)
        return None
    if delivery.reason != Reason.TEST and not _spend(channel, now):
        assert channel.minute_started_at is not None
        # Only a first attempt can become part of a digest.
        ready.filter(pk=delivery_id).update(
            due_at=channel.minute_started_at + MINUTE, held=delivery.attempts == 0
        )
        return None
    if delivery.held and delivery.attempts == 0:
        others = ready.filter(held=True, attempts=0).exclude(pk=delivery_id).order_by("id")
        members = list(others.values_list("pk", flat=True)[: MAX_IN_DIGEST - 1])
        Delivery.objects.filter(pk__in=members).update(leader=delivery)
    if ready.filter(pk=delivery_id).update(claimed_at=now, attempts=F("attempts") + 1) != 1:
        return None
    delivery.attempts += 1
    delivery.channel = channel
    return delivery


def _spend(channel: Channel, now: datetime) -> bool:
    """Count one more message in the channel's present minute. False if it has none left."""
    if channel.minute_started_at is None or not now - MINUTE < channel.minute_started_at <= now:
        channel.minute_started_at, channel.minute_messages = now, 0
    if channel.minute_messages >= channel.per_minute:
        return False
    channel.minute_messages += 1
    channel.save(update_fields=["minute_started_at", "minute_messages"])
    return True


def _waits_for_its_opening(delivery: Delivery) -> bool:
    if delivery.reason != Reason.RESOLVED:
        return False
    earlier = Delivery.objects.filter(UNFINISHED, event=delivery.event_id, channel=delivery.channel_id)
    return earlier.exclude(reason=Reason.RESOLVED).filter(pk__lt=delivery.pk).exists()


def _failed(delivery: Delivery, reason: str, *, permanent: bool, retry_after: float = 0.0) -> None:
    metrics.DELIVERIES.add(delivery.channel.kind, "failed")
    now = timezone.now()
    over = permanent or delivery.attempts >= MAX_ATTEMPTS or delivery.reason == Reason.TEST
    # Unless it was delivered by a worker that claimed it after this one's claim had expired.
    _message_of(delivery).filter(delivered_at=None).update(
        claimed_at=None,
        last_error=reason[:ERROR_LENGTH],
        due_at=now + max(FIRST_PAUSE * 2 ** (delivery.attempts - 1), timedelta(seconds=retry_after)),
        failed_at=now if over else None,
    )


def _message_of(delivery: Delivery) -> QuerySet[Delivery]:
    """All deliveries that the message of this one carries."""
    return Delivery.objects.filter(Q(pk=delivery.pk) | Q(leader=delivery.pk))
