"""The page of a run's readiness for FP8 and FP4, and its figure."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.run_readiness import missing_roles
from fp8scope_dashboard.pages.access import in_project, page, run_of
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.exponents import exponents_figure, summary_of
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.readiness.content import (
    FORMAT_TITLES,
    SCALING_TITLES,
    ReadinessQuery,
    answer,
    exponents_of,
)
from fp8scope_dashboard.telemetry import queries

TENSORS_A_PAGE = 50
# The sampled steps that the page offers.
MAX_STEPS = 50


@in_project()
def readiness(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The page, or only its answer when a choice has changed."""
    run = run_of(project, run_id)
    question = ReadinessQuery.of(request.GET.dict())
    answered = answer(run.pk, question)
    context: dict[str, Any] = {
        "run": run,
        "question": question,
        "answer": answered,
        "formats": FORMAT_TITLES,
        "scalings": SCALING_TITLES,
        "steps": queries.sampled_steps(run.pk, MAX_STEPS)[::-1],
    }
    if answered is None:
        context["missing_roles"] = missing_roles(run.pk, question.step)
    else:
        shown = Paginator(answered.rows, TENSORS_A_PAGE).get_page(request.GET.get("page"))
        context |= {
            "pages": shown,
            "rows": [answered.row(tensor) for tensor in shown],
            "address": question.address(),
        }
        if answered.chosen is not None:
            context["chosen_index"] = answered.sampled.indices[answered.chosen.index]
    is_part = request.headers.get("HX-Target") == "readiness"
    template = "pages/readiness/_readiness.html" if is_part else "pages/readiness/readiness.html"
    return page(request, project, "runs", template, context)


@figure_view
def readiness_figure(project: Project, query: QueryDict, run_id: UUID) -> AnyChart:
    """The exponents of the tensor of the address, with the zones of the format."""
    run, options = run_of(project, run_id), Options.of(query)
    answered = answer(run.pk, ReadinessQuery.of({name: str(value) for name, value in query.items()}))
    chosen = None if answered is None else answered.chosen
    if answered is None or chosen is None:
        return EmptyChart("No histogram of such a tensor up to this step.")
    histogram = exponents_of(answered, chosen)
    drawn = exponents_figure(histogram, options.theme, compact=options.compact)
    return Chart(drawn, summary_of(histogram, f"{chosen.name} at step {answered.sampled.step:,}"))
