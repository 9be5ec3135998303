"""Figures of a run as JSON, built here and drawn by plotly in the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final
from uuid import UUID

import numpy as np
import plotly.graph_objects as go
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.gzip import gzip_page
from numpy.typing import NDArray

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.what_if.formats import format_named
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.access import in_project, run_of
from fp8scope_dashboard.pages.comparison_groups import Arms
from fp8scope_dashboard.pages.efficiency import read_split
from fp8scope_dashboard.pages.figures.curves import curves_figure
from fp8scope_dashboard.pages.figures.efficiency import efficiency_figure
from fp8scope_dashboard.pages.figures.exponents import Exponents, exponents_figure, summary_of
from fp8scope_dashboard.pages.figures.ranges import central_range, loss_range
from fp8scope_dashboard.pages.figures.tensors import TensorLines, heatmap_figure, tensor_figure
from fp8scope_dashboard.pages.formatting import number, percent
from fp8scope_dashboard.pages.run_controls import annotation_marks
from fp8scope_dashboard.pages.series_loading import (
    AXIS_TITLES,
    Options,
    alert_marks,
    loss_curves,
    scalar_curves,
)
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.histograms import MIN_EXPONENT

# Baseline seeds drawn behind a run's loss.
SEEDS_SHOWN = 8
COLUMNS, COMPACT_COLUMNS = 400, 120
MOST_TENSORS = 2_000
FILTER_LENGTH = 200
UNITS: Final = {"tokens_per_second": "tokens / s", "step_seconds": "seconds / step"}

Builder = Callable[[HttpRequest, Run, Options], HttpResponse]


def figure_answer(figure: go.Figure, summary: str) -> HttpResponse:
    """A figure with a one-sentence description for screen readers."""
    body = f'{{"figure":{figure.to_json(validate=False)},"summary":{json.dumps(summary)}}}'
    return HttpResponse(body, content_type="application/json")


def empty_answer(text: str) -> HttpResponse:
    """A text that says why there is no figure and how to get one."""
    return HttpResponse(json.dumps({"empty": text}), content_type="application/json")


@gzip_page
@in_project()
def figure(request: HttpRequest, project: Project, run_id: UUID, name: str) -> HttpResponse:
    """The figure `name` of a run."""
    if name not in BUILDERS:
        raise Http404("No such figure.")
    return BUILDERS[name](request, run_of(project, run_id), Options.of(request.GET))


def _loss(request: HttpRequest, run: Run, options: Options) -> HttpResponse:
    baselines = lineage.baseline_runs(run)[-SEEDS_SHOWN:] if request.GET.get("baseline", "1") == "1" else []
    curves = loss_curves(
        [run, *baselines], Arms(run.project), options, quiet=[baseline.id for baseline in baselines]
    )
    mine = [curve for curve in curves if not curve.quiet]
    if not mine:
        return empty_answer("No loss yet. Log it with step.log(loss=…).")
    marks = [*alert_marks(run), *annotation_marks(run)] if options.axis == "step" else []
    drawn = curves_figure(
        curves,
        options.theme,
        y_range=None if options.zoomed else loss_range([curve.y for curve in curves]),
        log=options.log,
        compact=options.compact,
        x_title=AXIS_TITLES[options.axis],
        y_title="loss",
        marks=marks,
    )
    return figure_answer(drawn, _describe(run, "loss", mine[0].y))


def _scalar(request: HttpRequest, run: Run, options: Options) -> HttpResponse:
    name = request.GET.get("name", "")
    known = queries.scalar_names(run.id)
    if not name:
        name = next((scalar for scalar in UNITS if scalar in known), "")
    curves = scalar_curves([run], name, Arms(run.project), options) if name in known else []
    if not curves:
        return empty_answer("No values yet. Pass tokens=… to run.step() to get tokens per second.")
    unit = UNITS.get(name, glossary.title(name))
    y_range = None if options.zoomed else central_range([curves[0].y], from_zero=name in UNITS)
    drawn = curves_figure(
        curves,
        options.theme,
        y_range=y_range,
        log=options.log,
        compact=options.compact,
        x_title=AXIS_TITLES[options.axis],
        y_title=unit,
    )
    return figure_answer(drawn, _describe(run, unit, curves[0].y))


def _heatmap(request: HttpRequest, run: Run, options: Options) -> HttpResponse:
    statistic = request.GET.get("statistic", "overflow_rate")
    if statistic not in queries.statistic_names(run.id):
        return empty_answer("No tensor telemetry yet. Convert the model and call run.watch(model).")
    tensor_indices = _chosen_tensors(request, run)
    if not tensor_indices:
        return empty_answer("No tensor matches the filter.")
    columns = COMPACT_COLUMNS if options.compact else COLUMNS
    heatmap = queries.heatmap(
        run.id,
        statistic,
        tensors=tensor_indices,
        first=options.first,
        last=options.last,
        columns=columns,
    )
    order = _rows(heatmap.values, worst_first=request.GET.get("order") == "worst")
    names, indices = [heatmap.names[i] for i in order], [heatmap.indices[i] for i in order]
    values = heatmap.values[order]
    drawn = heatmap_figure(
        names, heatmap.step_edges, values, statistic, options.theme, compact=options.compact
    )
    # The browser needs these to map a click to a tensor.
    drawn.update_layout(meta={"indices": indices, "names": names})
    return figure_answer(
        drawn, f"{glossary.title(statistic)} of {len(names)} tensors of {run.name} over steps."
    )


def _rows(values: NDArray[np.float64], *, worst_first: bool) -> NDArray[np.intp]:
    """The rows with at least one value; all rows if none has one.

    Some statistics do not exist for some tensors: optimizer states have no overflow, for example.
    """
    seen = ~np.isnan(values).all(axis=1)
    rows = np.flatnonzero(seen if seen.any() else ~seen)
    if not worst_first:
        return rows
    with np.errstate(invalid="ignore"):
        peaks = np.nan_to_num(np.fmax.reduce(values[rows], axis=1, initial=-np.inf), neginf=-1.0)
    return rows[np.argsort(-peaks, kind="stable")]


def _chosen_tensors(request: HttpRequest, run: Run) -> list[int]:
    tensors = Tensor.objects.filter(run=run).order_by("index")
    if role := request.GET.get("role", "")[:FILTER_LENGTH]:
        tensors = tensors.filter(role=role)
    if text := request.GET.get("filter", "").strip()[:FILTER_LENGTH]:
        tensors = tensors.filter(name__icontains=text)
    return list(tensors.values_list("index", flat=True)[:MOST_TENSORS])


def _requested_tensor(request: HttpRequest, run: Run) -> Tensor | None:
    """The tensor whose name or index is in the address."""
    text = request.GET.get("tensor", "")
    tensors = Tensor.objects.filter(run=run)
    if text.isascii() and text.isdigit() and len(text) < 9:
        return tensors.filter(index=int(text)).first()
    return tensors.filter(name=text).first()


def _tensor(request: HttpRequest, run: Run, options: Options) -> HttpResponse:
    tensor = _requested_tensor(request, run)
    if tensor is None:
        return empty_answer("Select a tensor: click a row of the heat map above or type a name.")
    known = queries.statistic_names(run.id)
    lines: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    for statistic in ("amax", "scale", "overflow_rate", "underflow_rate", "subnormal_rate"):
        if statistic in known:
            series = queries.tensor_series(
                run.id, tensor.index, statistic, first=options.first, last=options.last, points=options.points
            )
            if len(series):
                lines[statistic] = (series.steps, series.values)
    if not lines:
        return empty_answer("No values of this tensor in these steps.")
    drawn = tensor_figure(
        TensorLines(tensor.name, tensor.format, lines), options.theme, compact=options.compact
    )
    return figure_answer(drawn, f"amax, largest representable value and rates of {tensor.name}.")


def _exponents(request: HttpRequest, run: Run, options: Options) -> HttpResponse:
    tensor = _requested_tensor(request, run)
    if tensor is None:
        return empty_answer("Select a tensor to see its exponents.")
    histogram = queries.histogram(run.id, tensor.index, _at_step(request))
    if histogram is None or not histogram.total:
        return empty_answer(
            "No histogram of this tensor up to this step. run.watch(model, every=N) records one on step 1 "
            "and every N steps after that, for FP8 layers and, with shadow=…, for other layers."
        )
    scales = queries.tensor_series(run.id, tensor.index, "scale", first=histogram.step, last=histogram.step)
    scale = float(scales.values[0]) if len(scales) else float("nan")
    blocks = queries.tensor_series(run.id, tensor.index, "blocks", first=histogram.step, last=histogram.step)
    exponents = Exponents(
        MIN_EXPONENT,
        histogram.counts,
        histogram.zeros,
        histogram.nonfinite,
        scale,
        format_named(tensor.format),
        in_blocks=len(blocks) > 0,
    )
    drawn = exponents_figure(exponents, options.theme, compact=options.compact)
    return figure_answer(drawn, summary_of(exponents, f"{tensor.name} at step {histogram.step}"))


def _at_step(request: HttpRequest) -> int | None:
    text = request.GET.get("step", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _efficiency(request: HttpRequest, run: Run, options: Options) -> HttpResponse:
    points = COMPACT_COLUMNS if options.compact else COLUMNS
    split = read_split(run.id, first=options.first, last=options.last, points=points)
    if not len(split.x):
        return empty_answer("No step times yet. Call run.watch(model, optimizer).")
    # On a narrow screen the legend has one line for each phase.
    height = 400 if options.compact else 320
    drawn = efficiency_figure(split, options.theme, compact=options.compact, height=height)
    shares = ", ".join(f"{glossary.title(name)} {percent(share)}" for name, share in split.shares.items())
    return figure_answer(drawn, f"Step time of {run.name} by phase: {shares}.")


def _describe(run: Run, quantity: str, values: NDArray[np.float64]) -> str:
    broken = int(np.count_nonzero(~np.isfinite(values)))
    note = f" {broken} of the points shown are not finite." if broken else ""
    first, last = number(float(values[0])), number(float(values[-1]))
    return f"{quantity} of {run.name}: {last} at the last step, {first} at the first.{note}"


BUILDERS: Final[dict[str, Builder]] = {
    "loss": _loss,
    "scalar": _scalar,
    "heatmap": _heatmap,
    "tensor": _tensor,
    "efficiency": _efficiency,
    "exponents": _exponents,
}
