"""The receivers of the notices of an alert, and the times.

The rule's channels, quiet hours, and escalation.
"""

from __future__ import annotations

from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.models import (
    Alert,
    AlertState,
    EntryKind,
    HistoryEntry,
    Reason,
    Rule,
    Severity,
)
from fp8scope_dashboard.notifications import run_changed


def notify(alert: Alert, reason: Reason) -> None:
    """Queue the notices of an alert, in the current transaction.

    They go to the channels of its rule, or, if it names none, to all of the project. In the rule's quiet
    hours they wait for the end of these.
    """
    rule = alert.rule
    channels = list(rule.channels.all()) if rule is not None else []
    outbox.enqueue(
        alert, channels or None, reason, occurrence=alert.reopened, due_at=_not_before(rule, alert.severity)
    )


def treats_alike(rule: Rule, other: Rule) -> bool:
    """Return whether alerts of two rules give no command, and go to the same people at the same times."""

    def way(rule: Rule) -> tuple[object, ...]:
        channels = (sorted(rule.channels.values_list("pk", flat=True)),)
        escalation = rule.escalate_minutes, sorted(rule.escalation_channels.values_list("pk", flat=True))
        quiet = rule.quiet_from, rule.quiet_to, rule.quiet_zone, rule.critical_breaks_quiet
        return (*channels, *escalation, *quiet)

    return not other.action and way(rule) == way(other)


def escalate_due() -> int:
    """Notify the second channels of open alerts that nobody acknowledged in time. Returns their number."""
    now, count = timezone.now(), 0
    for rule in Rule.objects.exclude(escalate_minutes=None).prefetch_related("escalation_channels"):
        waiting = Alert.objects.filter(
            rule=rule,
            run__deleted_at=None,
            state=AlertState.OPEN,
            escalated_at=None,
            waiting_since__lte=now - timedelta(minutes=rule.escalate_minutes or 0),
        )
        count += sum(_escalate(alert, rule, now) for alert in waiting.select_related("run"))
    return count


def quiet_until(moment: datetime, begin: time, end: time, zone: str) -> datetime | None:
    """The end of the quiet hours that a moment is in; None if it is in none.

    Args:
        begin, end: local times; `end` may be before `begin`: then the hours contain midnight.
        zone: the name of a time zone, such as Europe/Berlin.
    """
    local = moment.astimezone(ZoneInfo(zone))
    at = local.time()
    if begin < end:
        if not begin <= at < end:
            return None
        day = local.date()
    elif at >= begin:
        day = local.date() + timedelta(days=1)
    elif at < end:
        day = local.date()
    else:
        return None
    return datetime.combine(day, end, tzinfo=ZoneInfo(zone))


@transaction.atomic
def _escalate(alert: Alert, rule: Rule, now: datetime) -> bool:
    unclaimed = Alert.objects.filter(pk=alert.pk, state=AlertState.OPEN, escalated_at=None)
    if unclaimed.update(escalated_at=now) != 1:
        return False
    channels = list(rule.escalation_channels.all())
    earlier = HistoryEntry.objects.filter(event=alert, kind=EntryKind.ESCALATED).count()
    outbox.enqueue(
        alert,
        channels or None,
        Reason.ESCALATED,
        occurrence=earlier,
        due_at=_not_before(rule, alert.severity),
    )
    names = ", ".join(channel.name for channel in channels) or "all channels"
    text = f"Nobody acknowledged it within {rule.escalate_minutes} minutes: sent to {names}."
    HistoryEntry.objects.create(event=alert, kind=EntryKind.ESCALATED, text=text)
    run_changed(alert.run_id, alert.run.project_id, "alert", alert.step)
    return True


def _not_before(rule: Rule | None, severity: str) -> datetime | None:
    if rule is None or rule.quiet_from is None or rule.quiet_to is None:
        return None
    if severity == Severity.CRITICAL and rule.critical_breaks_quiet:
        return None
    return quiet_until(timezone.now(), rule.quiet_from, rule.quiet_to, rule.quiet_zone)
