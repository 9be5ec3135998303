"""The alerts of a project, and one alert: its evidence, its history, and what people do about it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from django.contrib import messages
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.custom_rules.audit import record_rules
from fp8scope_dashboard.alerts.custom_rules.documents import document_of
from fp8scope_dashboard.alerts.delivery import message, picture_links
from fp8scope_dashboard.alerts.models import (
    Alert,
    AlertState,
    EntryKind,
    Rule,
    RuleKind,
    Severity,
)
from fp8scope_dashboard.alerts.services import alerts_of, numbered
from fp8scope_dashboard.audit.log import actor_of
from fp8scope_dashboard.control.models import Command
from fp8scope_dashboard.diagnosis.services import suspected_cause
from fp8scope_dashboard.pages import formatting
from fp8scope_dashboard.pages.access import POST, back_to, in_project, open_alerts, page, person
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.alerts import muting
from fp8scope_dashboard.pages.alerts.evidence_figure import evidence_figure
from fp8scope_dashboard.pages.alerts.history import HistoryLine
from fp8scope_dashboard.pages.alerts.listing import (
    BY_CAUSE,
    FILTERS,
    GROUPINGS,
    Filter,
    ShownAlert,
    in_state,
    listed,
)
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.arms import Arms
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.run.controls.content import command_entry
from fp8scope_dashboard.runs.models import Run

# More alerts are listed without their charts, which open on demand.
MAX_CHARTS: Final = 8
MAX_CHOSEN: Final = 200
MAX_RUNS: Final = 100
MAX_RECENT: Final = 5


@in_project()
def alerts(request: HttpRequest, project: Project) -> HttpResponse:
    """The alerts that match the filter, newest first, grouped by run or by cause, in pages."""
    of_project = alerts_of(project)
    # Open alerts come first; without any, the page shows all.
    default = "open" if of_project.filter(state=AlertState.OPEN).exists() else "all"
    chosen = Filter.of(request.GET, default)
    matching = chosen.apply(of_project)
    kinds = of_project.order_by("kind").values_list("kind", flat=True).distinct()
    newest = chosen.in_state(of_project)
    groups, shown_page = listed(newest, request.GET.get("page"), chosen.by, Arms(project))
    listed_alerts = [shown.alert for group in groups for shown in group.alerts]
    listed_alerts += [stored for group in groups for stored in group.others]
    context = {
        "groups": groups,
        "choosable": len({stored.pk for stored in listed_alerts if stored.state == AlertState.OPEN}),
        "pages": shown_page,
        "newer": chosen.address(chosen.state, shown_page.number - 1) if shown_page.has_previous() else "",
        "older": chosen.address(chosen.state, shown_page.number + 1) if shown_page.has_next() else "",
        "with_charts": len(listed_alerts) <= MAX_CHARTS,
        "filter": chosen,
        "states": [
            (key, label, in_state(matching, key).count(), chosen.address(key))
            for key, label in FILTERS.items()
        ],
        "counted": "causes, those of most runs first" if chosen.by == BY_CAUSE else "alerts, newest first",
        "groupings": [(key, label, chosen.address(chosen.state, by=key)) for key, label in GROUPINGS.items()],
        "severities": Severity.choices,
        "kinds": [(kind, RuleKind(kind).label) for kind in kinds],
        "runs": Run.objects.filter(alerts__in=of_project).distinct().order_by("-created_at")[:MAX_RUNS],
        "only": Run.objects.filter(project=project, pk=chosen.run).first() if chosen.run else None,
        "total": of_project.count(),
        "open_matching": in_state(matching, AlertState.OPEN).count(),
        "undoable": lifecycle.acknowledged_lately(project, person(request)),
        "rules": rule_store.rules_in(project),
    }
    template = (
        "pages/alerts/_alerts.html"
        if request.headers.get("HX-Target") == "alerts"
        else "pages/alerts/alerts.html"
    )
    return page(request, project, "alerts", template, context)


@in_project()
def alert(request: HttpRequest, project: Project, alert_id: int) -> HttpResponse:
    """One alert with everything that is known about it."""
    stored = _alert(project, alert_id)
    is_refresh = request.headers.get("HX-Target") == "alert"
    commands = Command.objects.filter(event=stored).select_related("given_by", "event")
    context: dict[str, Any] = {
        "shown": ShownAlert.of(stored),
        "alert": stored,
        "arm": Arms(project).of(stored.run),
        "tensors": stored.evidence.get("tensors", []),
        "tensors_more": max(
            0, _count(stored.evidence.get("tensors_over")) - len(stored.evidence.get("tensors", []))
        ),
        "history": [HistoryLine.of(entry) for entry in stored.history.all()],
        "commands": [command_entry(command) for command in commands.prefetch_related("results")],
        "command_notes": stored.history.filter(kind=EntryKind.ORDERED),
        "diagnosis": suspected_cause(stored.run_id, stored.onset_step),
        "silences": muting.CHOICES,
        "longest_comment": lifecycle.LONGEST_COMMENT,
    }
    template = "pages/alerts/_alert_parts.html" if is_refresh else "pages/alerts/alert.html"
    return page(request, project, "alerts", template, context)


@in_project()
def recent(request: HttpRequest, project: Project) -> JsonResponse:
    """The open alerts after a number, newest first, for messages on open pages and of the browser."""
    after = whole_number(request.GET.get("after", "")) or 0
    of_project = numbered(alerts_of(project))
    newest = of_project.order_by("-number").values_list("number", flat=True).first() or 0
    fresh = (
        of_project.filter(number__gt=after, state=AlertState.OPEN).select_related("run").order_by("-number")
    )
    shown = [
        {
            "number": stored.number,
            "severity": stored.severity,
            "title": stored.title,
            "run": stored.run.name,
            "message": stored.message,
            "url": reverse("alert", args=[project.slug, stored.pk]),
        }
        for stored in fresh[:MAX_RECENT]
    ]
    counts = {"open": open_alerts(project), "more": max(0, fresh.count() - len(shown))}
    return JsonResponse({"newest": newest, "alerts": shown, **counts})


@in_project(permissions.ALERTS, methods=POST)
def acknowledge_many(request: HttpRequest, project: Project) -> HttpResponse:
    """Acknowledge the chosen alerts, or with `all` those that match the filter, and redirect back.

    `newest` is the number of the project's newest alert when the list was shown: later ones stay open.
    """
    if request.POST.get("all") == "1":
        newest = whole_number(request.POST.get("newest", "")) or 0
        matching = Filter.of(request.POST, "open").apply(alerts_of(project))
        chosen = numbered(matching).filter(number__lte=newest)
    else:
        texts = request.POST.getlist("alerts")[:MAX_CHOSEN]
        ids = [number for text in texts if (number := whole_number(text)) is not None]
        chosen = alerts_of(project).filter(pk__in=ids)
    try:
        count = lifecycle.acknowledge_all(chosen, person(request))
    except lifecycle.LifecycleError as error:
        messages.error(request, str(error))
    else:
        if not count:
            messages.warning(request, "Choose the alerts to acknowledge. Those chosen are not open any more.")
        # Otherwise the list says so, beside the button that undoes it.
    return _back(request, project)


@in_project(permissions.ALERTS, methods=POST)
def acknowledge_undo(request: HttpRequest, project: Project) -> HttpResponse:
    """Open the alerts again that the user acknowledged at the moment `at`, and redirect back."""
    try:
        at = datetime.fromisoformat(request.POST.get("at", ""))
        opened = lifecycle.undo_acknowledgement(project, person(request), at) if at.tzinfo else 0
    except (ValueError, OverflowError):
        opened = 0
    if opened:
        messages.success(
            request, f"{formatting.count(opened)} alert{'s are' if opened > 1 else ' is'} open again."
        )
    else:
        minutes = lifecycle.UNDO_FOR.seconds // 60
        messages.warning(
            request,
            f"Nothing was changed: acknowledging can be undone for {minutes} minutes, and only while nobody "
            "else has changed the alerts.",
        )
    return _back(request, project)


@in_project(permissions.ALERTS, methods=POST)
def change(request: HttpRequest, project: Project, alert_id: int, action: str) -> HttpResponse:
    """Change the state of an alert or comment on it, and redirect back."""
    stored, user = _alert(project, alert_id), person(request)
    try:
        done = _changed(stored, user, action, request.POST)
    except lifecycle.LifecycleError as error:
        messages.error(request, str(error))
    else:
        if done:
            messages.success(request, f"{done}: {stored.title} in {stored.run.name}.")
        else:
            messages.warning(request, f"Nothing was changed: the alert is {stored.state} already.")
    return _back(request, project)


def _changed(stored: Alert, user: User, action: str, post: Mapping[str, str]) -> str:
    """Carry out an action. Returns a word for what was done; empty if the state does not allow it."""
    if action == "acknowledge":
        return "Acknowledged" if lifecycle.acknowledge(stored, user) else ""
    if action == "mute":
        until, words = muting.muted_until(post, timezone.now())
        return f"Muted {words}" if lifecycle.mute(stored, user, until) else ""
    if action == "unmute":
        return "Unmuted" if lifecycle.unmute(stored, user) else ""
    if action == "resolve":
        return "Resolved" if lifecycle.resolve(stored, user) else ""
    if action == "reopen":
        return "Reopened" if lifecycle.reopen(stored, user) else ""
    lifecycle.comment(stored, user, post.get("text", ""))
    return "Comment added"


@in_project(permissions.CHANGE_RULES, methods=POST)
def switch_rule(request: HttpRequest, project: Project, rule_id: int) -> HttpResponse:
    """Switch a rule on or off in the whole project."""
    rule = Rule.objects.filter(project=project, pk=rule_id).first()
    if rule is None:
        raise Http404("No such rule.")
    before = document_of(rule)
    with transaction.atomic():
        rule_store.switch(rule, on=request.POST.get("enabled") == "1")
        record_rules(actor_of(request), project, [rule_store.change_of(rule, before)])
    state = "on" if rule.enabled else "off: it opens no alerts until it is switched on again"
    messages.success(request, f"The rule “{rule.title}” is {state}.")
    return _back(request, project)


@figure_view
def evidence(project: Project, query: QueryDict, alert_id: int) -> AnyChart:
    """The chart of an alert's evidence."""
    stored, options = _alert(project, alert_id), Options.of(query)
    drawn = evidence_figure(
        stored.evidence,
        options.theme,
        slot=Arms(project).of(stored.run).slot,
        onset=stored.onset_step,
        after=stored.after_step,
        detected=stored.step,
        threshold=stored.threshold,
        compact=options.compact,
    )
    if drawn is None:
        return EmptyChart("This alert stores no series.")
    return Chart(drawn, stored.message)


@require_safe
def picture(request: HttpRequest, signed: str) -> HttpResponse:
    """The chart of an alert as a PNG, for chats that fetch it without an account; see picture_links.py.

    Unauthenticated requests are limited by their address before they get here.
    """
    stored = picture_links.alert_of(signed)
    drawn = message.draw(stored) if stored is not None else None
    if drawn is None:
        raise Http404("No such picture.")
    answer = HttpResponse(drawn, content_type="image/png")
    answer["Cache-Control"] = "public, max-age=86400"
    answer["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"
    answer["X-Robots-Tag"] = "noindex, nofollow, noarchive"
    answer["Referrer-Policy"] = "no-referrer"
    return answer


def _alert(project: Project, alert_id: int) -> Alert:
    of_project = alerts_of(project).select_related("run", "rule", "acknowledged_by")
    stored = of_project.filter(pk=alert_id).first()
    if stored is None:
        raise Http404("No such alert.")
    return stored


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _back(request: HttpRequest, project: Project) -> HttpResponse:
    return back_to(request, project, reverse("alerts", args=[project.slug]))
