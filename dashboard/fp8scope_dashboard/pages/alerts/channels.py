"""The alert channels of a project: add, change and test them, and send failed deliveries again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings as django_settings
from django.contrib import messages
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.channels import CHANNELS, DeliveryError, email, service, webhook
from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.models import Channel, Delivery, Reason, Severity
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.pages.access import POST, in_project, page

MAX_CHANNELS = 20
MAX_FAILED = 100
NAME_LENGTH, SECRET_LENGTH = 128, 200
PER_MINUTE = (1, 600)

# The fields of each kind's form, and the check of what they contain.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "webhook": ("url", "secret"),
    "email": ("to", "server", "sender"),
    "service": ("url",),
}
CHECKS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "webhook": webhook.check_config,
    "email": email.check_config,
    "service": service.check_config,
}


@dataclass(frozen=True, kw_only=True)
class ChannelRow:
    """A channel, prepared for the page."""

    channel: Channel
    kind: str
    address: str
    waiting: int
    failed: int
    test: Delivery | None

    @property
    def receives(self) -> str:
        """Return which alerts the channel gets."""
        alerts = "Only critical alerts" if self.channel.least_severity == Severity.CRITICAL else "All alerts"
        return f"{alerts}, and a notice when an alert ends" if self.channel.send_resolved else alerts

    @property
    def is_testing(self) -> bool:
        """Return whether the result of the test is awaited."""
        return self.test is not None and self.test.delivered_at is None and self.test.failed_at is None

    @property
    def test_classes(self) -> str:
        """The CSS classes of the sentence on the test."""
        if self.test is None or self.is_testing:
            return "muted"
        return "notice notice--error" if self.test.failed_at else "notice notice--success"


@in_project()
def channels(request: HttpRequest, project: Project) -> HttpResponse:
    """The channels and the deliveries that failed for good."""
    return page(request, project, "alerts", "pages/alerts/channels.html", _context(project))


@in_project()
def channel_list(request: HttpRequest, project: Project) -> HttpResponse:
    """The list of channels, for a refresh while a test is under way."""
    return page(request, project, "alerts", "pages/alerts/_channels.html", _context(project))


def _context(project: Project) -> dict[str, Any]:
    rows = _rows(project)
    return {
        "rows": rows,
        "is_testing": any(row.is_testing for row in rows),
        "failed": _failed(project)[:MAX_FAILED],
        "severities": Severity.choices,
        "has_mail_server": bool(django_settings.SMTP_URL),
        "per_minute": PER_MINUTE,
    }


def _rows(project: Project) -> list[ChannelRow]:
    tests = {test.channel_id: test for test in _deliveries(project).filter(reason=Reason.TEST)}
    is_alert = ~Q(deliveries__reason=Reason.TEST)
    unsent = is_alert & Q(deliveries__delivered_at=None)
    waiting = Count("deliveries", filter=unsent & Q(deliveries__failed_at=None))
    failed = Count("deliveries", filter=unsent & Q(deliveries__failed_at__isnull=False))
    counted = Channel.objects.filter(project=project).annotate(waiting=waiting, failed=failed).order_by("id")
    return [
        ChannelRow(
            channel=channel,
            kind=CHANNELS[channel.kind].label,
            address=channel.address,
            waiting=channel.waiting,
            failed=channel.failed,
            test=tests.get(channel.pk),
        )
        for channel in counted
    ]


def _deliveries(project: Project) -> Any:
    return Delivery.objects.filter(channel__project=project)


def _failed(project: Project) -> Any:
    """Deliveries that failed for good, newest first. Those of a digest are sent with it."""
    failed = _deliveries(project).exclude(failed_at=None).filter(delivered_at=None, leader=None)
    return (
        failed.exclude(reason=Reason.TEST)
        .select_related("event__run", "channel")
        .annotate(others=Count("followers"))
        .order_by("-failed_at", "-id")
    )


@in_project(permissions.CHANGE_CHANNELS, methods=POST)
def channel_create(request: HttpRequest, project: Project, kind: str) -> HttpResponse:
    """Add a channel, and send it a test if the form asks for one."""
    if kind not in FIELDS:
        raise Http404("No such kind of channel.")
    name = request.POST.get("name", "").strip()[:NAME_LENGTH] or CHANNELS[kind].label
    if Channel.objects.filter(project=project).count() >= MAX_CHANNELS:
        messages.error(request, f"A project can have at most {MAX_CHANNELS} channels. Remove one first.")
    elif (config := _config(request, kind)) is not None:
        channel = Channel.objects.create(project=project, kind=kind, name=name, sealed=encrypt_json(config))
        record(actor_of(request), project, Action.CHANNEL, f"added “{name}” ({kind})")
        if request.POST.get("test") == "1":
            outbox.enqueue_test(channel)
            messages.success(request, f"Added the channel “{name}”, and sent it a test.")
        else:
            messages.success(request, f"Added the channel “{name}”. Send a test to see whether it works.")
    return _back(project)


@in_project(permissions.CHANGE_CHANNELS, methods=POST)
def channel_change(request: HttpRequest, project: Project, channel_id: int) -> HttpResponse:
    """Test, enable, disable or remove a channel, or replace its options or its settings."""
    channel = Channel.objects.filter(project=project, pk=channel_id).first()
    if channel is None:
        raise Http404("No such channel.")
    actions = {
        "test": _test,
        "enable": _enable,
        "disable": _enable,
        "remove": _remove,
        "options": _change_options,
        "replace": _replace,
    }
    if (action := actions.get(request.POST.get("action", ""))) is not None:
        action(request, channel)
        if action is not _test:
            record(actor_of(request), project, Action.CHANNEL, f"{request.POST['action']} “{channel.name}”")
    return _back(project)


@in_project(permissions.ALERTS, methods=POST)
def delivery_again(request: HttpRequest, project: Project, channel_id: int) -> HttpResponse:
    """Send one failed delivery of a channel again, or, without `delivery`, all of them."""
    if not Channel.objects.filter(project=project, pk=channel_id).exists():
        raise Http404("No such channel.")
    failed = _failed(project).filter(channel=channel_id)
    if chosen := request.POST.get("delivery", ""):
        failed = failed.filter(pk=chosen) if chosen.isdecimal() and len(chosen) < 19 else failed.none()
    count = outbox.send_again(list(failed))
    messages.success(request, f"Sending {count} message{'' if count == 1 else 's'} again.")
    return _back(project)


def _test(request: HttpRequest, channel: Channel) -> None:
    outbox.enqueue_test(channel)


def _enable(request: HttpRequest, channel: Channel) -> None:
    channel.enabled = request.POST["action"] == "enable"
    channel.save(update_fields=["enabled"])
    messages.success(request, f"The channel “{channel.name}” is {'on' if channel.enabled else 'off'}.")


def _remove(request: HttpRequest, channel: Channel) -> None:
    channel.delete()
    messages.success(request, f"Removed the channel “{channel.name}”.")


def _change_options(request: HttpRequest, channel: Channel) -> None:
    per_minute = request.POST.get("per_minute", "").strip()
    low, high = PER_MINUTE
    if not per_minute.isdecimal() or len(per_minute) > 9 or not low <= int(per_minute) <= high:
        messages.error(request, f"Messages per minute must be a whole number from {low} to {high}.")
        return
    channel.per_minute = int(per_minute)
    severity = request.POST.get("least_severity", "")
    if severity in Severity.values:
        channel.least_severity = severity
    channel.send_resolved = request.POST.get("send_resolved") == "1"
    channel.name = request.POST.get("name", "").strip()[:NAME_LENGTH] or channel.name
    channel.save(update_fields=["per_minute", "least_severity", "send_resolved", "name"])
    messages.success(request, f"Saved the options of “{channel.name}”.")


def _replace(request: HttpRequest, channel: Channel) -> None:
    if (config := _config(request, channel.kind)) is None:
        return
    channel.config = config
    channel.save(update_fields=["sealed"])
    signed = ""
    if channel.kind == "webhook":
        signed = " Its messages are signed." if "secret" in config else " Its messages are not signed."
    messages.success(request, f"Replaced the settings of “{channel.name}”.{signed}")


def _config(request: HttpRequest, kind: str) -> dict[str, str] | None:
    """The posted settings. If they are invalid: None, and a message on the next page."""
    texts = {name: request.POST.get(name, "").strip() for name in FIELDS[kind]}
    config = {name: text for name, text in texts.items() if text}
    if len(config.get("secret", "")) > SECRET_LENGTH:
        messages.error(request, f"The secret may have at most {SECRET_LENGTH} characters.")
        return None
    try:
        CHECKS[kind](config)
    except DeliveryError as error:
        messages.error(request, str(error))
        return None
    return config


def _back(project: Project) -> HttpResponse:
    return redirect(reverse("channels", args=[project.slug]))
