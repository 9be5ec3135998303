"""The lifecycle of an alert: its states, who may move it from one to another, and its audit trail.

    open --acknowledge--> acknowledged --mute--> muted --(time is over)--> open
    acknowledged --(undo, within UNDO_FOR)--> open
    open, acknowledged, muted --resolve--> resolved --reopen--> open

Every change is one UPDATE that names the states it may start from, so of two simultaneous changes one loses.
Each change writes one HistoryEntry in the same transaction. Automatic changes have no user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connection, transaction
from django.db.models import Count, F, QuerySet
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts.delivery import routing
from fp8scope_dashboard.alerts.models import (
    RUN_WIDE,
    Alert,
    AlertState,
    DetectorState,
    EntryKind,
    HistoryEntry,
    Reason,
)
from fp8scope_dashboard.instrumentation import metrics
from fp8scope_dashboard.notifications import run_changed

LONGEST_MUTE: Final = timedelta(days=30)
LONGEST_COMMENT: Final = 2_000
MAX_COMMENTS: Final = 500
MAX_AT_ONCE: Final = 20_000
# Runs whose pages are refreshed at once when many alerts change; others refresh with their next rows.
MAX_ANNOUNCED: Final = 50
# Acknowledging can be undone for so long.
UNDO_FOR: Final = timedelta(minutes=10)
# A condition that comes back within so many steps of its end reopens the alert instead of opening another.
REOPEN_STEPS: Final = 100

OPEN, ACKNOWLEDGED = AlertState.OPEN, AlertState.ACKNOWLEDGED
MUTED, RESOLVED = AlertState.MUTED, AlertState.RESOLVED
UNRESOLVED: Final = (OPEN, ACKNOWLEDGED, MUTED)


class LifecycleError(ValueError):
    """The change is invalid; the message says what to do."""


@dataclass(frozen=True)
class Transition:
    """The states that a change may start from, and the state it leads to."""

    sources: tuple[AlertState, ...]
    target: AlertState


TRANSITIONS: Final[Mapping[EntryKind, Transition]] = {
    EntryKind.ACKNOWLEDGED: Transition((OPEN, MUTED), ACKNOWLEDGED),
    EntryKind.MUTED: Transition((OPEN, ACKNOWLEDGED, MUTED), MUTED),
    EntryKind.UNMUTED: Transition((MUTED,), OPEN),
    EntryKind.RESOLVED: Transition(UNRESOLVED, RESOLVED),
    EntryKind.REOPENED: Transition((RESOLVED,), OPEN),
}


def note_opened(alert: Alert) -> None:
    """Begin the history of a new alert."""
    transaction.on_commit(lambda: metrics.ALERTS.add(alert.severity))
    write(alert, EntryKind.OPENED, text=alert.message)


def acknowledge(alert: Alert, user: User) -> bool:
    """Record that a person takes care of an alert. False if somebody did before, or if it is resolved."""
    now = timezone.now()
    return _move(
        alert, EntryKind.ACKNOWLEDGED, user, acknowledged_by=user, acknowledged_at=now, muted_until=None
    )


@transaction.atomic
def acknowledge_all(alerts: QuerySet[Alert], user: User) -> int:
    """Acknowledge the open ones of these alerts, at one moment, by which they can be undone together.

    Returns:
        How many were open.

    Raises:
        LifecycleError: more than MAX_AT_ONCE are open.
    """
    chosen = Alert.objects.filter(pk__in=alerts.order_by().values("pk"), state=OPEN)
    locked = chosen.select_for_update().order_by("pk").values_list("pk", flat=True)
    ids = list(locked[: MAX_AT_ONCE + 1])
    if len(ids) > MAX_AT_ONCE:
        raise LifecycleError(f"At most {MAX_AT_ONCE:,} alerts can be acknowledged at once: filter the list.")
    _set_all(
        ids,
        EntryKind.ACKNOWLEDGED,
        user,
        state=ACKNOWLEDGED,
        acknowledged_by=user,
        acknowledged_at=timezone.now(),
    )
    return len(ids)


def acknowledged_lately(project: Project, user: User) -> tuple[datetime, int] | None:
    """Return when the user last acknowledged alerts that are acknowledged still, and how many.

    None if UNDO_FOR is over.
    """
    latest = (
        Alert.objects.filter(
            run__project=project,
            run__deleted_at=None,
            state=ACKNOWLEDGED,
            acknowledged_by=user,
            acknowledged_at__gt=timezone.now() - UNDO_FOR,
        )
        .order_by("-acknowledged_at")
        .values_list("acknowledged_at")
        .annotate(count=Count("pk"))
        .first()
    )
    return None if latest is None else (latest[0], latest[1])


@transaction.atomic
def undo_acknowledgement(project: Project, user: User, at: datetime) -> int:
    """Open the alerts again that the user acknowledged at this moment.

    Returns:
        How many are open again: 0 if others have changed them since, or UNDO_FOR is over.
    """
    if at < timezone.now() - UNDO_FOR:
        return 0
    done = Alert.objects.filter(
        run__project=project, state=ACKNOWLEDGED, acknowledged_by=user, acknowledged_at=at
    )
    ids = list(done.select_for_update(of=("self",)).order_by("pk").values_list("pk", flat=True))
    _set_all(ids, EntryKind.UNACKNOWLEDGED, user, state=OPEN, acknowledged_by=None, acknowledged_at=None)
    return len(ids)


def _set_all(ids: list[int], kind: EntryKind, user: User, **fields: Any) -> None:
    """Set the fields of alerts that are locked, write their histories, and refresh open pages."""
    Alert.objects.filter(pk__in=ids).update(**fields)
    HistoryEntry.objects.bulk_create(
        [HistoryEntry(event_id=pk, kind=kind, user=user, user_name=user.username) for pk in ids],
        batch_size=1_000,
    )
    # The step of one alert for each run: pages ask for the rest.
    first = Alert.objects.filter(pk__in=ids).order_by("run_id", "-step").distinct("run_id")
    for alert in first.select_related("run")[:MAX_ANNOUNCED]:
        _announce(alert)


def mute(alert: Alert, user: User, until: datetime) -> bool:
    """Silence an alert until a time; then it is open again, unless its condition has ended.

    Returns:
        False if it is resolved.

    Raises:
        LifecycleError: if the time is over already, or more than LONGEST_MUTE ahead.
    """
    now = timezone.now()
    if not now < until <= now + LONGEST_MUTE:
        raise LifecycleError(f"Choose a time within the next {LONGEST_MUTE.days} days.")
    text = f"until {until:%Y-%m-%d %H:%M} UTC"
    return _move(alert, EntryKind.MUTED, user, text, muted_until=until)


def unmute(alert: Alert, user: User | None = None) -> bool:
    """End the silence of an alert before its time, or, without a user, because its time is over."""
    text = "" if user is not None else "The time is over, and the condition lasts."
    now = timezone.now()
    return _move(alert, EntryKind.UNMUTED, user, text, muted_until=None, waiting_since=now, escalated_at=None)


def resolve(alert: Alert, user: User | None = None, *, step: int | None = None, reason: str = "") -> bool:
    """Close an alert, by hand or, without a user, because its condition has ended at `step`.

    Returns:
        False if it was closed before.
    """
    text = reason or ("" if user is not None else "The condition has ended.")
    step = alert.run.last_step if step is None else step
    with transaction.atomic():
        is_closed = _move(
            alert,
            EntryKind.RESOLVED,
            user,
            text,
            step=step,
            resolved_at=timezone.now(),
            resolved_step=step,
            muted_until=None,
        )
        if is_closed:
            routing.notify(alert, Reason.RESOLVED)
    return is_closed


@transaction.atomic
def reopen(alert: Alert, user: User | None = None, *, text: str = "") -> bool:
    """Open a resolved alert again, by hand or, without a user, because its condition came back.

    Without a user, the training process gets the alert again. Call it under the run's lock then.

    Returns:
        False if the alert is not resolved.

    Raises:
        LifecycleError: with a user, if a newer alert of the same rule is unresolved. Detection knows that it
            has another cause: a rule about tensors may have several alerts at once.
    """
    if user is not None:
        # The lock of the evaluation, which opens alerts.
        DetectorState.objects.get_or_create(run_id=alert.run_id, writer=RUN_WIDE)
        DetectorState.objects.select_for_update().get(run_id=alert.run_id, writer=RUN_WIDE)
        if same_condition(alert).filter(state__in=UNRESOLVED).exclude(pk=alert.pk).exists():
            raise LifecycleError("A newer alert of this rule is not resolved yet: use that one.")
    return _open_again(alert, TRANSITIONS[EntryKind.REOPENED], user, text)


@transaction.atomic
def open_again(alert: Alert, text: str) -> bool:
    """Raise an unresolved alert again, because its condition came back after a person had opened it.

    The training process gets the alert again. Call it under the run's lock.

    Returns:
        False if it is muted, or resolved.
    """
    return _open_again(alert, Transition((OPEN, ACKNOWLEDGED), OPEN), None, text)


def _open_again(alert: Alert, transition: Transition, user: User | None, text: str) -> bool:
    fields: dict[str, Any] = {"sent_again_as": _next_number()} if user is None else {}
    return _move(
        alert,
        EntryKind.REOPENED,
        user,
        text,
        transition=transition,
        resolved_at=None,
        resolved_step=None,
        acknowledged_by=None,
        acknowledged_at=None,
        waiting_since=timezone.now(),
        escalated_at=None,
        reopened=F("reopened") + 1,
        **fields,
    )


def send_again(alert: Alert) -> None:
    """Give the alert to the training process once more. Call it under the run's lock."""
    alert.sent_again_as = _next_number()
    alert.save(update_fields=["sent_again_as"])


def comment(alert: Alert, user: User, text: str) -> None:
    """Add a person's comment.

    Raises:
        LifecycleError: if it is empty or too long, or the alert has too many.
    """
    text = text.strip()
    if not text or len(text) > LONGEST_COMMENT or "\0" in text:
        raise LifecycleError(f"A comment has 1 to {LONGEST_COMMENT:,} characters.")
    if alert.history.filter(kind=EntryKind.COMMENT).count() >= MAX_COMMENTS:
        raise LifecycleError(f"The alert has {MAX_COMMENTS} comments already.")
    with transaction.atomic():
        write(alert, EntryKind.COMMENT, user, text)
        _announce(alert)


def unmute_due() -> int:
    """Open the muted alerts whose time is over. Returns their number."""
    over = Alert.objects.filter(state=MUTED, muted_until__lte=timezone.now()).select_related("run")
    return sum(unmute(alert) for alert in over)


def same_condition(alert: Alert) -> Any:
    """The alerts of the same run, rule and generation."""
    return Alert.objects.filter(
        run_id=alert.run_id, kind=alert.kind, rule_name=alert.rule_name, generation=alert.generation
    )


def write(alert: Alert, kind: EntryKind, user: User | None = None, text: str = "") -> None:
    """Add an entry to the history of an alert."""
    HistoryEntry.objects.create(
        event=alert,
        kind=kind,
        user=user,
        user_name="" if user is None else user.username,
        text=text[:LONGEST_COMMENT],
    )


@transaction.atomic
def _move(
    alert: Alert,
    kind: EntryKind,
    user: User | None,
    text: str = "",
    step: int | None = None,
    transition: Transition | None = None,
    **fields: Any,
) -> bool:
    transition = transition or TRANSITIONS[kind]
    allowed = Alert.objects.filter(pk=alert.pk, state__in=transition.sources)
    if allowed.update(state=transition.target, **fields) != 1:
        return False
    alert.refresh_from_db()
    write(alert, kind, user, text)
    _announce(alert, step)
    return True


def _announce(alert: Alert, step: int | None = None) -> None:
    run_changed(alert.run_id, alert.run.project_id, "alert", alert.step if step is None else step)


def _next_number() -> int:
    """A number above all ids of alerts, from the sequence of these ids."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence('alerts_event', 'id'))")
        number: int = cursor.fetchone()[0]
        return number
