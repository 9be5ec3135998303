"""The figure of an alert's evidence: the series around its onset that the alert stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.ranges import central_range
from fp8scope_dashboard.pages.charts.theme import Slot, Theme, faded
from fp8scope_dashboard.text.onsets import steps_in_words

# Statistics that change by orders of magnitude.
MAGNITUDES = ("scale", "amax")
# Shades and dashes of the tensors in one chart: they are no arms.
TENSOR_SLOTS: Sequence[Slot] = ("shade-1", "shade-2", "shade-3")


def evidence_figure(
    evidence: Mapping[str, Any],
    theme: Theme,
    *,
    slot: Slot,
    onset: int,
    detected: int,
    threshold: float | None,
    after: int | None = None,
    compact: bool = False,
) -> go.Figure | None:
    """Draw the series from before the onset to the step of detection.

    The series are a statistic of tensors, or a scalar; the loss is drawn with that of the baseline. Returns
    None if the alert stores no series.
    """
    series = [line for line in evidence.get("series", ()) if line.get("steps")]
    tensors = [line for line in series if "tensor" in line]
    if not series:
        return None
    statistic, curves = _curves(evidence, series, tensors, slot)
    is_rate = statistic.endswith("_rate")
    values = [curve.y for curve in curves]
    log = statistic in MAGNITUDES
    y_range = None if log else central_range(values, from_zero=is_rate)
    limit = None if statistic == "loss" else threshold
    if y_range is not None and is_rate and limit is not None:
        y_range = (y_range[0], max(y_range[1], 1.3 * limit))
    title = "overflow" if statistic == "overflow_rate" else statistic.replace("_", " ")
    figure = curves_figure(
        curves, theme, y_range=y_range, log=log, compact=compact, height=230, y_title=title
    ).editable()
    _mark_onset(figure, theme, onset, steps_in_words(onset, after), detected)
    if is_rate:
        figure.update_yaxes(tickformat=".2~p", selector={"overlaying": None})
    if limit is not None:
        figure.add_hline(y=limit, line={"color": theme.muted, "width": 1.2, "dash": "dash"})
    return figure


def _curves(
    evidence: Mapping[str, Any],
    series: Sequence[Mapping[str, Any]],
    tensors: Sequence[Mapping[str, Any]],
    slot: Slot,
) -> tuple[str, list[Curve]]:
    """The statistic that the series are of, and their curves."""
    if tensors:
        statistic = str(tensors[0]["name"]).removeprefix(str(tensors[0]["tensor"])).strip()
        slots = zip(tensors, TENSOR_SLOTS, strict=False)
        return statistic, [_curve(line, line["tensor"], line_slot) for line, line_slot in slots]
    statistic = str(series[0]["name"])
    # Of another scalar than the loss, the loss beside it has another unit.
    lines = evidence.get("baseline", ()) if statistic == "loss" else ()
    baseline = [_curve(line, "baseline", "bf16", quiet=True) for line in lines if line.get("steps")]
    return statistic, [*baseline, _curve(series[0], "this run", slot)]


def _mark_onset(figure: go.Figure, theme: Theme, onset: int, in_words: str, detected: int) -> None:
    figure.add_vrect(x0=onset, x1=detected, fillcolor=faded(theme.danger, 0.1), line_width=0, layer="below")
    figure.add_vline(x=onset, line={"color": theme.danger, "width": 1.2, "dash": "dot"})
    figure.add_annotation(
        x=onset,
        y=1,
        yref="paper",
        yanchor="top",
        xanchor="right",
        text=f"onset {in_words} ",
        showarrow=False,
        font={"size": 11, "color": theme.danger},
    )


def _curve(series: Mapping[str, Any], arm: str, slot: Slot, *, quiet: bool = False) -> Curve:
    # The wire format writes "NaN" and "Infinity"; float() accepts both.
    values = np.array([float(value) for value in series["values"]], np.float64)
    steps = np.asarray(series["steps"], np.float64)
    return Curve(name=str(series["name"]), arm=arm, slot=slot, x=steps, y=values, quiet=quiet)
