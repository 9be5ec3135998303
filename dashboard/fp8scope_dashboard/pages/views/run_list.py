"""The list of a project's runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.paginator import Paginator
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.utils.cache import patch_cache_control

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Event, EventState
from fp8scope_dashboard.analysis.judging import standing_now
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.comparison_groups import Arm, Arms
from fp8scope_dashboard.pages.figures.sparkline import WIDTH, sparkline
from fp8scope_dashboard.pages.summary import Verdict, baseline_groups, verdict_of
from fp8scope_dashboard.pages.verdicts import STATES, Badge, state_badge
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search import parse, search
from fp8scope_dashboard.telemetry import queries

RUNS_A_PAGE = 50


class Row:
    """One row of the list."""

    def __init__(self, run: Run, arm: Arm, baselines: set[str], open_events: int) -> None:
        self.run = run
        self.arm = arm
        self.state: Badge = state_badge(standing_now(run))
        self.verdict: Verdict = verdict_of(run, baselines)
        self.open_events = open_events

    @property
    def progress(self) -> float | None:
        if not self.run.total_steps or self.run.last_step is None:
            return None
        return min(100.0, 100.0 * self.run.last_step / self.run.total_steps)


@in_project()
def project(request: HttpRequest, project: Project) -> HttpResponse:
    """The runs, newest first. A project without runs shows how to send the first."""
    query = parse(request.GET.get("q", ""))
    state = request.GET.get("state", "")
    runs = Run.objects.filter(project=project).select_related("comparison")
    total = runs.count()
    runs = search(runs, query)
    if state in STATES:
        runs = runs.filter(state=state)
    runs = runs.defer("config", "environment", "summary", "error").order_by("-created_at", "id")
    shown = Paginator(runs, RUNS_A_PAGE).get_page(request.GET.get("page"))
    opened = _open_events(shown)
    arms, baselines = Arms(project), baseline_groups(project.pk)
    context: dict[str, Any] = {
        "rows": [Row(run, arms.of(run), baselines, opened.get(run.id, 0)) for run in shown],
        "pages": shown,
        "total": total,
        "search": query.text,
        "problems": query.problems,
        "selected_state": state,
        "states": STATES,
        "server_url": settings.BASE_URL,
    }
    template = "pages/_runs.html" if request.headers.get("HX-Target") == "runs" else "pages/runs.html"
    return page(request, project, "runs", template, context)


def _open_events(runs: Iterable[Run]) -> dict[UUID, int]:
    events = Event.objects.filter(run__in=list(runs), state=EventState.OPEN).order_by()
    return dict(events.values_list("run_id").annotate(Count("id")))


@in_project(cacheable=True)
def spark(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The run's loss as a small image. Its address contains the number of rows, so browsers may cache it."""
    shown = run_of(project, run_id)
    series = queries.scalar(shown.id, "loss", points=WIDTH)
    image = sparkline(series.steps.astype(float), series.values, Arms(project).of(shown).slot)
    answer = HttpResponse(image, content_type="image/svg+xml")
    patch_cache_control(answer, private=True, max_age=86_400, immutable=True)
    return answer
