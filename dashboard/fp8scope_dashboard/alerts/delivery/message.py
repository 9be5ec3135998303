"""Compose the message that one delivery sends, from its alert and those of its digest."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from django.conf import settings
from django.urls import reverse

from fp8scope_dashboard.alerts.channels import ChannelMessage, Notice
from fp8scope_dashboard.alerts.channels.wording import headline
from fp8scope_dashboard.alerts.delivery import chart, picture_links
from fp8scope_dashboard.alerts.models import Alert, Delivery, EntryKind, Reason
from fp8scope_dashboard.diagnosis.services import suspected_cause
from fp8scope_dashboard.runs.services import page_url

logger = logging.getLogger(__name__)

# The entries of the history that say why a later notice is sent.
NOTED: Mapping[str, EntryKind] = {
    Reason.REOPENED: EntryKind.REOPENED,
    Reason.ESCALATED: EntryKind.ESCALATED,
    Reason.RESOLVED: EntryKind.RESOLVED,
}


def compose(delivery: Delivery) -> ChannelMessage:
    """The message of a delivery that is no follower."""
    followers = delivery.followers.select_related("event__run__project").order_by("id")
    members = [sent for sent in (delivery, *followers) if sent.event is not None]
    notices = tuple(_notice(member, member.event) for member in members if member.event is not None)
    project = delivery.channel.project
    url = f"{settings.BASE_URL}{reverse('alerts', args=[project.slug])}"

    if len(notices) != 1 or delivery.event is None:
        return ChannelMessage(key=str(delivery.key), project=project.slug, url=url, notices=notices)
    alert = delivery.event
    chart_url = picture_links.address_of(delivery) if alert.evidence.get("series") else ""
    title = headline(notices[0])
    return ChannelMessage(
        key=str(delivery.key),
        project=project.slug,
        url=url,
        notices=notices,
        draw_chart=lambda: draw(alert, title),
        chart_url=chart_url,
    )


def _notice(delivery: Delivery, alert: Alert) -> Notice:
    run, tensors = alert.run, alert.evidence.get("tensors", [])
    return Notice(
        delivery=delivery.pk,
        key=str(delivery.key),
        alert=str(_first_key(delivery)),
        reason=delivery.reason,
        event=alert.pk,
        kind=alert.kind,
        label=alert.title,
        severity=alert.severity,
        state=alert.state,
        message=alert.message,
        onset_step=alert.onset_step,
        step=alert.step,
        value=alert.value,
        threshold=alert.threshold,
        opened_at=alert.opened_at,
        project=run.project.slug,
        run=str(run.id),
        run_name=run.name,
        url=f"{settings.BASE_URL}{reverse('alert', args=[run.project.slug, alert.pk])}",
        run_url=page_url(run),
        tensors=tensors,
        tensors_over=max(len(tensors), int(alert.evidence.get("tensors_over", 0))),
        after_step=alert.after_step,
        note=_note(alert, delivery.reason),
        cause=_suspected_cause(alert),
        also=tuple(f"{entry['title']} since step {entry['since']}" for entry in alert.further),
        commands=tuple(_texts(alert, EntryKind.ORDERED)),
    )


def _texts(alert: Alert, kind: EntryKind) -> list[str]:
    return list(alert.history.filter(kind=kind).values_list("text", flat=True))


def _note(alert: Alert, reason: str) -> str:
    """Return why a later notice is sent: the latest entry of its kind in the alert's history."""
    if reason not in NOTED:
        return ""
    entry = alert.history.filter(kind=NOTED[reason]).last()
    if entry is None:
        return ""
    where = f" at step {alert.resolved_step:,}" if reason == Reason.RESOLVED and alert.resolved_step else ""
    who = f" by {entry.user_name}" if entry.user_name else ""
    return f"{entry.get_kind_display().capitalize()}{who}{where}. {entry.text}".strip()


def _suspected_cause(alert: Alert) -> str:
    diagnosis = suspected_cause(alert.run_id, alert.onset_step)
    return "" if diagnosis is None else diagnosis.sentence


def _first_key(delivery: Delivery) -> object:
    """The key of the alert's first notice to this channel."""
    if delivery.reason == Reason.OPENED:
        return delivery.key
    same = Delivery.objects.filter(event=delivery.event_id, channel=delivery.channel_id)
    return same.order_by("id").values_list("key", flat=True)[0]


def draw(alert: Alert, title: str = "") -> bytes | None:
    """The chart of an alert as a PNG, under a title (by default the alert's); None without one."""
    try:
        return chart.draw(
            alert.evidence,
            title=title or alert.title,
            onset=alert.onset_step,
            after=alert.after_step,
            detected=alert.step,
            threshold=alert.threshold,
        )
    except Exception:  # an alert without its picture is better than none
        logger.exception("The chart of alert %d could not be drawn.", alert.pk)
        return None
