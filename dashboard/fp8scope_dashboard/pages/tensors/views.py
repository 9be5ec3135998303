"""The tensors of a run: their map, their ranking, and the page of one tensor."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.tensor_onsets import SUSTAINED, WINDOW, is_rate
from fp8scope_dashboard.analysis.what_if.targets import TARGET_FORMATS
from fp8scope_dashboard.control.commands import HOW_TO_ALLOW, accepted_kinds
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.access import in_project, may, page, run_of
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.answers import EmptyChart, answer
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.charts.table import csv_of
from fp8scope_dashboard.pages.tensors.exponent_picture import (
    MAX_STEPS,
    PARTS,
    default_format,
    picture,
    sample_of,
    shown_shares,
    target_of,
)
from fp8scope_dashboard.pages.tensors.map import TensorMap, document, table, tensor_map
from fp8scope_dashboard.pages.tensors.query import (
    TensorQuery,
    chosen_tensors,
    no_values_of,
    other_run,
    tensor_named,
)
from fp8scope_dashboard.pages.tensors.range_counts import unjudged_steps
from fp8scope_dashboard.pages.tensors.ranking import ROWS_A_PAGE, SORTS, rank
from fp8scope_dashboard.runs.models import Run, RunState, Tensor
from fp8scope_dashboard.telemetry import queries

# The rows of the table of shares.
OUTCOMES = (
    ("saturated", "Saturate"),
    ("normal", "Normal"),
    ("subnormal", "Subnormal"),
    ("flushed", "Flush to zero"),
    ("error", "Error, relative to Σx²"),
)


@gzip_page
@in_project()
def map_figure(request: HttpRequest, project: Project, run_id: UUID, form: str) -> HttpResponse:
    """The map of the tensors as JSON, or as a table in CSV."""
    run, options = run_of(project, run_id), Options.of(request.GET)
    statistics = queries.statistic_names(run.pk)
    question = TensorQuery.of(request.GET, statistics)
    if question.statistic not in statistics:
        return answer(request, EmptyChart(no_values_of(question.statistic, statistics)))
    tensors = chosen_tensors(run, question)
    if not tensors:
        return answer(request, EmptyChart("No tensor matches the filter. Shorten it, or choose all roles."))
    against = other_run(run, question) if question.mode == "difference" else None
    if question.mode == "difference" and against is None:
        return answer(request, EmptyChart("No other run of this project has tensors to compare with."))
    shown = tensor_map(run, tensors, question, against=against, first=options.first, last=options.last)
    if shown is None:
        return answer(request, EmptyChart(_why_nothing(question, against)))
    if form == "csv":
        return _csv(shown, run, question)
    note = "" if against is None else f"against {against.name}"
    return HttpResponse(json.dumps(document(shown, question, note)), content_type="application/json")


def _why_nothing(question: TensorQuery, against: Run | None) -> str:
    title = glossary.title(question.statistic).lower()
    if against is not None:
        return (
            f"{against.name} has no {title} of tensors with these names. Choose amax, which every watched "
            "run has, or another run."
        )
    return f"No {title} of these tensors in these steps."


def _csv(shown: TensorMap, run: Run, question: TensorQuery) -> HttpResponse:
    file = HttpResponse(csv_of(table(shown)), content_type="text/csv; charset=utf-8")
    file["Content-Disposition"] = f'attachment; filename="{run.pk}-{question.statistic}.csv"'
    return file


@in_project()
def ranking(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """The table of tensors by their onset or their worst values, one page of it."""
    run = run_of(project, run_id)
    statistics = queries.statistic_names(run.pk)
    question = TensorQuery.of(request.GET, statistics)
    context: dict[str, Any] = {"run": run, "question": question, "sorts": SORTS}
    if question.statistic in statistics:
        tensors = chosen_tensors(run, question)
        indices, names = [tensor.index for tensor in tensors], [tensor.name for tensor in tensors]
        ranked = rank(
            run,
            question.statistic,
            indices,
            names,
            question.threshold,
            question.sort,
            left_out=unjudged_steps(run, question.statistic),
            everything=question.everything,
        )
        last = max(1, -(-len(ranked) // ROWS_A_PAGE))
        number = min(question.page, last)
        context |= {
            "ranking": ranked,
            "rows": ranked.page(number),
            "number": number,
            "last": last,
            "first_shown": (number - 1) * ROWS_A_PAGE + 1,
            "last_shown": min(number * ROWS_A_PAGE, len(ranked)),
            "is_rate": is_rate(question.statistic),
            "sustained": SUSTAINED,
            "window": WINDOW,
        }
    return page(request, project, "runs", "pages/tensors/_tensor_ranking.html", context)


@in_project()
def tensor(request: HttpRequest, project: Project, run_id: UUID, index: int) -> HttpResponse:
    """The page of one tensor, or only its content for the drawer."""
    run = run_of(project, run_id)
    shown = _tensor_of(run, index)
    sample = sample_of(run, shown, _step_of(request))
    format = request.GET.get("format", "")
    chosen_format = format if format in TARGET_FORMATS else default_format(shown)
    part = request.GET.get("part", "")
    chosen_part = part if part in PARTS else "tensor"
    context: dict[str, Any] = {
        "run": run,
        "tensor": shown,
        "index_text": str(shown.index),
        "sample": sample,
        "formats": {name: target.title for name, target in TARGET_FORMATS.items()},
        "parts": PARTS,
        "chosen_format": chosen_format,
        "chosen_part": chosen_part,
        "chosen_step": _step_of(request),
        "default_format": default_format(shown),
        "steps": queries.sampled_steps(run.pk, MAX_STEPS)[::-1],
        "neighbours": _neighbours(run, shown),
        "is_drawer": request.GET.get("drawer") == "1",
        **_fallback(request, project, run, shown),
    }
    if sample is not None:
        target = target_of(chosen_format, chosen_part)
        context["picture"] = picture(sample, shown, target, run.recipe)
        exponents = reverse("figure", args=[project.slug, run.pk, "exponents"])
        context["picture_address"] = f"{exponents}?{urlencode({'tensor': shown.index, 'step': sample.step})}"
        shares = shown_shares(context["picture"])
        context["outcomes"] = [(key, title, *shares[key]) for key, title in OUTCOMES]
    template = "pages/tensors/_tensor_panel.html" if context["is_drawer"] else "pages/tensors/tensor.html"
    return page(request, project, "runs", template, context)


@in_project()
def tensor_find(request: HttpRequest, project: Project, run_id: UUID) -> HttpResponse:
    """Redirect to the page of the tensor whose name or index is in the address."""
    run = run_of(project, run_id)
    chosen = tensor_named(run, request.GET.get("tensor", ""))
    if chosen is None:
        raise Http404("No such tensor in this run.")
    address = reverse("tensor", args=[project.slug, run.pk, chosen.index])
    return redirect(f"{address}?drawer=1" if request.GET.get("drawer") == "1" else address)


@gzip_page
@in_project()
def tensor_picture(request: HttpRequest, project: Project, run_id: UUID, index: int) -> HttpResponse:
    """The exponents of one tensor, with the shares of every margin in a format."""
    run = run_of(project, run_id)
    shown = _tensor_of(run, index)
    sample = sample_of(run, shown, _step_of(request))
    if sample is None:
        return answer(request, EmptyChart("No histogram of this tensor up to this step."))
    target = target_of(request.GET.get("format", "") or default_format(shown), request.GET.get("part", ""))
    drawn = picture(sample, shown, target, run.recipe)
    return HttpResponse(json.dumps(drawn), content_type="application/json")


def _tensor_of(run: Run, index: int) -> Tensor:
    shown = Tensor.objects.filter(run=run, index=index).first()
    if shown is None:
        raise Http404("No such tensor in this run.")
    return shown


def _step_of(request: HttpRequest) -> int | None:
    return whole_number(request.GET.get("step", ""))


def _neighbours(run: Run, shown: Tensor) -> dict[str, Tensor | None]:
    """The tensors before and after in the order of the model."""
    tensors = Tensor.objects.filter(run=run)
    return {
        "before": tensors.filter(index__lt=shown.index).order_by("-index").first(),
        "after": tensors.filter(index__gt=shown.index).order_by("index").first(),
    }


def _fallback(request: HttpRequest, project: Project, run: Run, shown: Tensor) -> dict[str, Any]:
    """Return whether the user can order this layer to BF16 now, and if not, why."""
    if not may(request, project, permissions.COMMAND):
        why = "Members of the project can order it."
    elif run.state not in (RunState.RUNNING, RunState.SILENT):
        why = f"The run is {run.state}, so no process can change its layers."
    elif "fallback" not in accepted_kinds(run):
        why = f"The training script does not accept it. {HOW_TO_ALLOW['fallback']}"
    elif not shown.module:
        why = "This tensor belongs to no layer."
    else:
        why = ""
    return {"can_fall_back": not why, "why_no_fallback": why}
