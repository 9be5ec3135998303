"""The figure of the loss of FP8 against BF16: the delta over the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages.charts.ranges import central_range
from fp8scope_dashboard.pages.charts.theme import (
    DASHES,
    Slot,
    Theme,
    escaped,
    faded,
    make_room_for_legend,
    new_figure,
)
from fp8scope_dashboard.statistics.arrays import Floats

# Limits of the delta chart's range, in tolerances.
MIN_TOLERANCES, MAX_TOLERANCES = 1.6, 4.0
# It contains the ends of curves that are farther away, up to this many tolerances, with some room.
FARTHEST, ROOM = 40.0, 1.15
# The bands of more curves would hide each other.
MAX_BANDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class DeltaCurve:
    """Difference of a run's loss to the baseline, float64[N] each: fractions of it, or nats.

    `low` and `high` are the anytime-valid interval of a look at each point.
    """

    name: str
    slot: Slot
    x: Floats
    delta: Floats
    low: Floats
    high: Floats
    tolerance: float | None
    window: tuple[float, float] | None = None


def delta_figure(
    curves: Sequence[DeltaCurve],
    margin: float,
    theme: Theme,
    *,
    compact: bool = False,
    x_title: str = "tokens",
    nats: bool = False,
) -> go.Figure:
    """Each run's delta with its narrowing band; the margin as a green zone, wider tolerances as lines."""
    y_title = "FP8 − BF16" if nats else "(FP8 − BF16) / BF16"
    figure = new_figure(theme, compact=compact, height=280, x_title=x_title, y_title=y_title)
    figure.add_hrect(y0=-margin, y1=margin, fillcolor=faded(theme.good, 0.13), line_width=0, layer="below")
    figure.add_hline(y=0, line={"color": theme.muted, "width": 1})
    tolerances = {curve.tolerance for curve in curves if curve.tolerance and curve.tolerance > margin}
    for tolerance in sorted(tolerances):
        for side in (tolerance, -tolerance):
            figure.add_hline(y=side, line={"color": theme.good, "width": 1.4, "dash": "dash"})
    low, high = _range(curves, max([margin, *tolerances]))
    are_few = len(curves) <= MAX_BANDS
    for curve in curves:
        _draw(figure, curve, theme, (2.0 * low - high, 2.0 * high - low), nats=nats, has_band=are_few)
        _mark_outside(figure, curve, low, high, theme, nats=nats)
    for first, last in {curve.window for curve in curves if curve.window is not None}:
        figure.add_vrect(x0=first, x1=last, fillcolor=faded(theme.muted, 0.1), line_width=0, layer="below")
    figure.update_yaxes(tickformat="+.3~g" if nats else ".2~%", range=[low, high])
    room = {"height": figure.layout.height, "margin": figure.layout.margin.to_plotly_json()}
    make_room_for_legend(room, [curve.name for curve in curves], compact=compact)
    # The curve under the pointer shows its band; see figure.js.
    figure.update_layout(showlegend=True, hovermode="x unified" if are_few else "closest", **room)
    return figure


def _mark_outside(
    figure: go.Figure, curve: DeltaCurve, low: float, high: float, theme: Theme, *, nats: bool
) -> None:
    """Mark with a triangle where a curve leaves the chart."""
    for outside, symbol, edge in (
        (curve.delta > high, "triangle-up", high),
        (curve.delta < low, "triangle-down", low),
    ):
        exits = np.flatnonzero(outside & ~np.roll(outside, 1))
        if len(exits):
            figure.add_scatter(
                x=curve.x[exits],
                y=np.full(len(exits), edge),
                mode="markers",
                showlegend=False,
                legendgroup=curve.name,
                name=escaped(curve.name),
                cliponaxis=False,
                customdata=curve.delta[exits],
                marker={"symbol": symbol, "size": 10, "color": theme.arms[curve.slot]},
                hovertemplate=f"%{{customdata:{'+.3~g' if nats else '+.2%'}}}, outside the chart"
                "<extra>%{fullData.name}</extra>",
            )


def _draw(
    figure: go.Figure,
    curve: DeltaCurve,
    theme: Theme,
    limits: tuple[float, float],
    *,
    nats: bool,
    has_band: bool,
) -> None:
    """Draw a curve and its band, which is far wider than the chart after few points: it ends at `limits`.

    Without `has_band` the band is hidden until somebody points at the curve.
    """
    colour = theme.arms[curve.slot]
    figure.add_scatter(
        x=np.concatenate([curve.x, curve.x[::-1]]),
        y=np.clip(np.concatenate([curve.high, curve.low[::-1]]), *limits),
        fill="toself",
        fillcolor=faded(colour, 0.16),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        legendgroup=curve.name,
        name=f"{curve.name}, interval",
        visible=has_band,
        meta="band",
    )
    figure.add_scatter(
        x=curve.x,
        y=curve.delta,
        mode="lines",
        name=escaped(curve.name),
        legendgroup=curve.name,
        line={"color": colour, "width": 2.2, "dash": DASHES[curve.slot]},
        hovertemplate=f"%{{y:{'+.3~g' if nats else '+.3%'}}}<extra>%{{fullData.name}}</extra>",
    )


def _range(curves: Sequence[DeltaCurve], tolerance: float) -> tuple[float, float]:
    """A range for the second half of the run: early differences are large and mean little.

    It contains where each curve ends, within FARTHEST tolerances.
    """
    late = [curve.delta[len(curve.delta) // 2 :] for curve in curves]
    seen = central_range(late) if late else None
    least, most = MIN_TOLERANCES * tolerance, MAX_TOLERANCES * tolerance
    low, high = seen or (-least, least)
    low, high = max(min(low, -least), -most), min(max(high, least), most)
    tails = [curve.delta[-max(1, len(curve.delta) // 4) :] for curve in curves if len(curve.delta)]
    ends = [float(np.median(tail[np.isfinite(tail)])) for tail in tails if np.isfinite(tail).any()]
    farthest = FARTHEST * tolerance
    return (
        max(-farthest, min([low, *(ROOM * end for end in ends)])),
        min(farthest, max([high, *(ROOM * end for end in ends)])),
    )
