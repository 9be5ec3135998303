"""The alerts of a project with their evidence; users acknowledge them and mute rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from django.contrib import messages
from django.db.models import Prefetch, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_POST

from fp8scope_dashboard.accounts.models import Project, Role
from fp8scope_dashboard.alerts import life
from fp8scope_dashboard.alerts.models import Delivery, Event, EventState, Rule
from fp8scope_dashboard.pages.access import in_project, page, person
from fp8scope_dashboard.pages.comparison_groups import Arm, Arms
from fp8scope_dashboard.pages.figures.evidence import evidence_figure
from fp8scope_dashboard.pages.series_loading import Options
from fp8scope_dashboard.pages.verdicts import EVENT_STATES, SEVERITIES, Badge
from fp8scope_dashboard.pages.views.figures import empty_answer, figure_answer
from fp8scope_dashboard.runs.models import Run

MOST_EVENTS = 200
FILTERS = {"open": "Open", "acknowledged": "Acknowledged", "resolved": "Resolved", "all": "All"}


@dataclass(frozen=True)
class Alert:
    """An event, prepared for the page."""

    event: Event
    severity: Badge
    state: Badge
    deliveries: list[Delivery]

    @property
    def delay(self) -> int:
        """Steps from onset to detection."""
        return max(0, self.event.step - self.event.onset_step)


@dataclass(frozen=True)
class Group:
    """The alerts of one run."""

    run: Run
    arm: Arm
    alerts: list[Alert] = field(default_factory=list)


@in_project()
def alerts(request: HttpRequest, project: Project) -> HttpResponse:
    """The alerts of one state, newest first, grouped by run."""
    state = request.GET.get("state", "")
    events = Event.objects.filter(run__project=project)
    if state not in FILTERS:
        # Open alerts come first; without any, the page shows all.
        state = "open" if events.filter(state=EventState.OPEN).exists() else "all"
    only = _run_id(request.GET.get("run", ""))
    context = {
        "groups": _grouped(_listed(events, state, only), Arms(project)),
        "state": state,
        "filters": {key: (label, _listed(events, key, only).count()) for key, label in FILTERS.items()},
        "only": Run.objects.filter(project=project, pk=only).first() if only else None,
        "total": events.count(),
        "rules": Rule.objects.filter(project=project).order_by("id"),
    }
    template = "pages/_alerts.html" if request.headers.get("HX-Target") == "alerts" else "pages/alerts.html"
    return page(request, project, "alerts", template, context)


@require_POST
@in_project(Role.MEMBER)
def acknowledge(request: HttpRequest, project: Project, event_id: int) -> HttpResponse:
    """Acknowledge an alert and redirect back."""
    event = _event(project, event_id)
    if life.acknowledge(event, person(request)):
        messages.success(request, f"Acknowledged: {event.get_kind_display()} in {event.run.name}.")
    return redirect(_back(request, project))


@require_POST
@in_project(Role.MEMBER)
def mute(request: HttpRequest, project: Project, rule_id: int) -> HttpResponse:
    """Mute or unmute a rule in the whole project."""
    rule = Rule.objects.filter(project=project, pk=rule_id).first()
    if rule is None:
        raise Http404("No such rule.")
    rule.enabled = request.POST.get("enabled") == "1"
    rule.save(update_fields=["enabled"])
    state = "unmuted" if rule.enabled else "muted: it opens no alerts until it is unmuted"
    messages.success(request, f"The rule “{rule.get_kind_display()}” is {state}.")
    return redirect(_back(request, project))


@gzip_page
@in_project()
def evidence(request: HttpRequest, project: Project, event_id: int) -> HttpResponse:
    """The chart of an alert's evidence."""
    event, options = _event(project, event_id), Options.of(request.GET)
    drawn = evidence_figure(
        event.evidence,
        options.theme,
        slot=Arms(project).of(event.run).slot,
        onset=event.onset_step,
        detected=event.step,
        threshold=event.threshold,
        compact=options.compact,
    )
    if drawn is None:
        return empty_answer("This alert stores no series.")
    return figure_answer(drawn, event.message)


def _event(project: Project, event_id: int) -> Event:
    event = Event.objects.select_related("run").filter(run__project=project, pk=event_id).first()
    if event is None:
        raise Http404("No such alert.")
    return event


def _listed(events: QuerySet[Event], state: str, only: UUID | None) -> QuerySet[Event]:
    if only is not None:
        events = events.filter(run=only)
    return events if state == "all" else events.filter(state=state)


def _grouped(events: QuerySet[Event], arms: Arms) -> list[Group]:
    deliveries = Prefetch("deliveries", Delivery.objects.select_related("channel"))
    groups: dict[UUID, Group] = {}
    newest = events.order_by("-opened_at", "-id")[:MOST_EVENTS]
    for event in newest.select_related("run", "rule", "acknowledged_by").prefetch_related(deliveries):
        group = groups.setdefault(event.run_id, Group(event.run, arms.of(event.run)))
        group.alerts.append(
            Alert(event, SEVERITIES[event.severity], EVENT_STATES[event.state], list(event.deliveries.all()))
        )
    return list(groups.values())


def _run_id(text: str) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        return None


def _back(request: HttpRequest, project: Project) -> str:
    """The page that contained the form. `next` is user input, so only this project's pages are allowed."""
    address = request.POST.get("next", "")
    prefix = f"/p/{project.slug}/"
    return address if address.startswith(prefix) and "\\" not in address else f"{prefix}alerts/"
