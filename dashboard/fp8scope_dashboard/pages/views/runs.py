"""The list of a project's runs, and the page of one run."""

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
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.judging import standing_now
from fp8scope_dashboard.pages import run_controls
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.comparison_groups import Arm, Arms
from fp8scope_dashboard.pages.efficiency import recent_figures
from fp8scope_dashboard.pages.figures.sparkline import WIDTH, sparkline
from fp8scope_dashboard.pages.glossary.tensors import STATISTICS
from fp8scope_dashboard.pages.ranks import ranks_of
from fp8scope_dashboard.pages.summary import Verdict, baseline_groups, summarise, verdict_of
from fp8scope_dashboard.pages.verdicts import STATES, Badge, state_badge
from fp8scope_dashboard.pages.views.kin import kin_context
from fp8scope_dashboard.pages.views.progress import progress_context
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.runs.search import parse, search
from fp8scope_dashboard.telemetry import queries

RUNS_A_PAGE = 50
# The most tensors that the search field suggests.
MOST_SUGGESTED = 2_000
SECONDARY = ("tokens_per_second", "step_seconds", "grad_norm", "learning_rate")
TENSOR_NAME_LENGTH = 512
SEEDS_COMPARED = 8


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


@in_project()
def run(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The page of a run, or only its head for a refresh."""
    shown = run_of(project, run_id)
    baselines = lineage.baseline_runs(shown)
    context: dict[str, Any] = {
        "summary": summarise(shown),
        **kin_context(shown),
        "state": state_badge(standing_now(shown)),
        "arm": Arms(project).of(shown),
        "compare_ids": [shown.id, *(baseline.id for baseline in baselines[-SEEDS_COMPARED:])],
    }
    if request.headers.get("HX-Target") == "run-head":
        return page(request, project, "runs", "pages/_run_head.html", context)
    statistics = queries.statistic_names(shown.id)
    scalars = [name for name in queries.scalar_names(shown.id) if name not in ("loss", "tokens")]
    tensors = Tensor.objects.filter(run=shown)
    context |= {
        "chosen_tensor": request.GET.get("tensor", "")[:TENSOR_NAME_LENGTH],
        "statistics": [name for name in STATISTICS if name in statistics],
        "scalars": sorted(
            scalars, key=lambda name: (SECONDARY.index(name) if name in SECONDARY else 99, name)
        ),
        "tensors": tensors.order_by("index")[:MOST_SUGGESTED],
        "tensor_count": tensors.count(),
        "roles": list(tensors.order_by("role").values_list("role", flat=True).distinct()),
        "baselines": baselines,
        "efficiency": recent_figures(shown),
        "modules": run_controls.modules_of(shown),
        **run_controls.steering(shown),
        **run_controls.findings(shown),
        "ranks": ranks_of(shown),
        **progress_context([shown.id]),
    }
    return page(request, project, "runs", "pages/run.html", context)


@in_project()
def ranks(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card of ranks and attempts, for a refresh."""
    shown = run_of(project, run_id)
    context = {"run": shown, "ranks": ranks_of(shown)}
    return page(request, project, "runs", "pages/_ranks.html", context)


@in_project(cacheable=True)
def spark(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The run's loss as a small image. Its address contains the number of rows, so browsers may cache it."""
    shown = run_of(project, run_id)
    series = queries.scalar(shown.id, "loss", points=WIDTH)
    image = sparkline(series.steps.astype(float), series.values, Arms(project).of(shown).slot)
    answer = HttpResponse(image, content_type="image/svg+xml")
    patch_cache_control(answer, private=True, max_age=86_400, immutable=True)
    return answer
