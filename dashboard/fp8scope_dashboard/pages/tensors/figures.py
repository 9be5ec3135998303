"""Figures of a run's tensors: heat map, one tensor, its exponents."""

from __future__ import annotations

from typing import Final

import numpy as np
from django.http import QueryDict
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.formats import format_named
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.address_values import whole_number
from fp8scope_dashboard.pages.charts.addresses import DrawRunFigure
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.exponents import (
    Exponents,
    History,
    exponents_figure,
    history_figure,
    history_summary,
    summary_of,
)
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.tensors.heat_map import TensorLines, heatmap_figure, tensor_figure
from fp8scope_dashboard.pages.tensors.query import no_values_of, tensor_named
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.histograms import MIN_EXPONENT

COLUMNS, COMPACT_COLUMNS = 400, 120
MAX_TENSORS = 2_000
FILTER_LENGTH = 200


def _heatmap(run: Run, query: QueryDict, options: Options) -> AnyChart:
    recorded = queries.statistic_names(run.id)
    statistic = query.get("statistic") or queries.overflow_name(recorded) or "amax"
    if statistic not in recorded:
        return EmptyChart(no_values_of(statistic, recorded))
    tensor_indices = _chosen_tensors(query, run)
    if not tensor_indices:
        return EmptyChart("No tensor matches the filter.")
    columns = COMPACT_COLUMNS if options.compact else COLUMNS
    heatmap = queries.heatmap(
        run.id,
        statistic,
        tensors=tensor_indices,
        first=options.first,
        last=options.last,
        columns=columns,
    )
    order = _rows(heatmap.values, worst_first=query.get("order") == "worst")
    names, indices = [heatmap.names[i] for i in order], [heatmap.indices[i] for i in order]
    values = heatmap.values[order]
    drawn = heatmap_figure(
        names, heatmap.step_edges, values, statistic, options.theme, compact=options.compact
    )
    # The browser needs these to map a click to a tensor.
    drawn.update_layout(meta={"indices": indices, "names": names})
    return Chart(drawn, f"{glossary.title(statistic)} of {len(names)} tensors of {run.name} over steps.")


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


def _chosen_tensors(query: QueryDict, run: Run) -> list[int]:
    tensors = Tensor.objects.filter(run=run).order_by("index")
    if role := query.get("role", "")[:FILTER_LENGTH]:
        tensors = tensors.filter(role=role)
    if text := query.get("filter", "").strip()[:FILTER_LENGTH]:
        tensors = tensors.filter(name__icontains=text)
    return list(tensors.values_list("index", flat=True)[:MAX_TENSORS])


def _requested_tensor(query: QueryDict, run: Run) -> Tensor | None:
    """The tensor whose name or index is in the address."""
    return tensor_named(run, query.get("tensor", ""))


def _tensor(run: Run, query: QueryDict, options: Options) -> AnyChart:
    tensor = _requested_tensor(query, run)
    if tensor is None:
        return EmptyChart("Select a tensor: click a row of the heat map above or type a name.")
    recorded = queries.statistic_names(run.id)
    lines: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    overflow = queries.overflow_name(recorded) or ""
    for statistic in ("amax", "scale", overflow, "underflow_rate", "subnormal_rate"):
        if statistic in recorded:
            series = queries.tensor_series(
                run.id, tensor.index, statistic, first=options.first, last=options.last, points=options.points
            )
            if len(series):
                lines[statistic] = (series.steps, series.values)
    if not lines:
        return EmptyChart("No values of this tensor in these steps.")
    drawn = tensor_figure(
        TensorLines(tensor.name, tensor.format, lines), options.theme, compact=options.compact
    )
    return Chart(drawn, f"amax, largest representable value and rates of {tensor.name}.")


def _exponents(run: Run, query: QueryDict, options: Options) -> AnyChart:
    tensor = _requested_tensor(query, run)
    if tensor is None:
        return EmptyChart("Select a tensor to see its exponents.")
    histogram = queries.histogram(run.id, tensor.index, _at_step(query))
    if histogram is None or not histogram.total:
        return EmptyChart(
            "No histogram of this tensor up to this step. run.watch(model, every=N) records one on step 1 "
            "and every N steps after that, for FP8 layers and, with shadow=…, for other layers."
        )
    at = histogram.step
    scales, amax, blocks = (
        queries.tensor_series(run.id, tensor.index, statistic, first=at, last=at)
        for statistic in ("scale", "amax", "blocks")
    )
    exponents = Exponents(
        first=MIN_EXPONENT,
        counts=histogram.counts,
        zeros=histogram.zeros,
        nonfinite=histogram.nonfinite,
        scale=float(scales.values[0]) if len(scales) else float("nan"),
        format=format_named(tensor.format),
        in_blocks=len(blocks) > 0,
        amax=float(amax.values[0]) if len(amax) else float("nan"),
    )
    drawn = exponents_figure(exponents, options.theme, compact=options.compact)
    return Chart(drawn, summary_of(exponents, f"{tensor.name} at step {at:,}"))


def _history(run: Run, query: QueryDict, options: Options) -> AnyChart:
    tensor = _requested_tensor(query, run)
    if tensor is None:
        return EmptyChart("Select a tensor to see its exponents.")
    histograms = queries.tensor_histograms(run.pk, tensor.index, options.first, options.last)
    histograms = [stored for stored in histograms if stored.total]
    if not histograms:
        return EmptyChart("No histograms of this tensor in these steps.")
    ends = histograms[0].step, histograms[-1].step
    recorded = queries.statistic_names(run.pk)
    in_blocks = "scale_median" in recorded and len(_series(run, tensor, "scale_median", ends, options)) > 0
    scales = _series(run, tensor, "scale_median" if in_blocks else "scale", ends, options)
    history = History(
        steps=np.array([stored.step for stored in histograms]),
        first=MIN_EXPONENT,
        shares=np.array([stored.counts / stored.total for stored in histograms]),
        scale_steps=scales.steps,
        scales=scales.values,
        format=format_named(tensor.format),
        in_blocks=in_blocks,
    )
    drawn = history_figure(history, options.theme, compact=options.compact)
    return Chart(drawn, history_summary(history, tensor.name))


def _series(
    run: Run, tensor: Tensor, statistic: str, ends: tuple[int, int], options: Options
) -> queries.Series:
    return queries.tensor_series(
        run.pk, tensor.index, statistic, first=ends[0], last=ends[1], points=options.points
    )


def _at_step(query: QueryDict) -> int | None:
    return whole_number(query.get("step", ""))


FIGURES: Final[dict[str, DrawRunFigure]] = {
    "heatmap": _heatmap,
    "tensor": _tensor,
    "exponents": _exponents,
    "history": _history,
}
