"""The page of one run."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.judging import standing_now
from fp8scope_dashboard.pages import run_controls
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.comparison_groups import Arms
from fp8scope_dashboard.pages.efficiency import recent_figures
from fp8scope_dashboard.pages.glossary.tensors import STATISTICS
from fp8scope_dashboard.pages.ranks import ranks_of
from fp8scope_dashboard.pages.summary import summarise
from fp8scope_dashboard.pages.verdicts import state_badge
from fp8scope_dashboard.pages.views.kin import kin_context
from fp8scope_dashboard.pages.views.progress import progress_context
from fp8scope_dashboard.pages.views.tensors import tensor_context
from fp8scope_dashboard.runs.models import Tensor
from fp8scope_dashboard.telemetry import queries

# The most tensors that the search field suggests.
MOST_SUGGESTED = 2_000
SECONDARY = ("tokens_per_second", "step_seconds", "grad_norm", "learning_rate")
TENSOR_NAME_LENGTH = 512
SEEDS_COMPARED = 8


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
        **tensor_context(shown, request),
    }
    return page(request, project, "runs", "pages/run.html", context)


@in_project()
def ranks(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The card of ranks and attempts, for a refresh."""
    shown = run_of(project, run_id)
    context = {"run": shown, "ranks": ranks_of(shown)}
    return page(request, project, "runs", "pages/_ranks.html", context)
