"""An alert's evidence: the series around its onset, as the event keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages.figures.curves import Curve, curves_figure
from fp8scope_dashboard.pages.figures.ranges import central_range
from fp8scope_dashboard.pages.figures.theme import Slot, Theme, faded

# Tensors in one chart, told apart by the dashes that go with these.
TENSOR_SLOTS: Sequence[Slot] = ("fp8-1", "fp8-2", "fp8-3")


def evidence_figure(
    evidence: Mapping[str, Any],
    theme: Theme,
    *,
    slot: Slot,
    onset: int,
    detected: int,
    threshold: float | None,
    compact: bool = False,
) -> go.Figure | None:
    """Draw what was seen, from before the onset to the step at which the rule was sure.

    Rates of tensors where the alert is about tensors, else the loss over its baseline's. None where the
    event keeps no series.
    """
    series = [one for one in evidence.get("series", ()) if one.get("steps")]
    tensors = [one for one in series if "tensor" in one]
    if not series:
        return None
    baseline = [
        _curve(one, "baseline", "bf16", quiet=True)
        for one in evidence.get("baseline", ())
        if one.get("steps")
    ]
    if tensors:
        curves = [_curve(one, one["tensor"], each) for one, each in zip(tensors, TENSOR_SLOTS, strict=False)]
    else:
        curves = [*baseline, *(_curve(one, "this run", slot) for one in series)]
    values = [curve.y for curve in curves]
    y_range = central_range(values, from_zero=bool(tensors))
    if y_range is not None and tensors and threshold is not None:
        y_range = (y_range[0], max(y_range[1], 1.3 * threshold))
    figure = curves_figure(
        curves, theme, y_range=y_range, compact=compact, height=230, y_title="overflow" if tensors else "loss"
    )
    figure.add_vrect(x0=onset, x1=detected, fillcolor=faded(theme.danger, 0.1), line_width=0, layer="below")
    figure.add_vline(x=onset, line={"color": theme.danger, "width": 1.2, "dash": "dot"})
    figure.add_annotation(
        x=onset,
        y=1,
        yref="paper",
        yanchor="top",
        xanchor="right",
        text=f"onset {onset} ",
        showarrow=False,
        font={"size": 11, "color": theme.danger},
    )
    if tensors:
        figure.update_yaxes(tickformat=".2~p", selector={"overlaying": None})
        if threshold is not None:
            figure.add_hline(y=threshold, line={"color": theme.muted, "width": 1.2, "dash": "dash"})
    return figure


def _curve(series: Mapping[str, Any], arm: str, slot: Slot, *, quiet: bool = False) -> Curve:
    # "NaN" and "Infinity" are how the wire writes them; float() reads both.
    values = np.array([float(value) for value in series["values"]], np.float64)
    return Curve(str(series["name"]), arm, slot, np.asarray(series["steps"], np.float64), values, quiet=quiet)
