"""Curves of scalars, such as the losses of one or more runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.pages.charts.marks import Mark, draw_marks, stretches
from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.pages.charts.ranges import Range
from fp8scope_dashboard.pages.charts.step_places import StepPlaces
from fp8scope_dashboard.pages.charts.theme import (
    DASHES,
    Slot,
    Theme,
    base_layout,
    escaped,
    faded,
    make_room_for_legend,
    steps_axis,
)
from fp8scope_dashboard.statistics.arrays import Floats

# Positions of marks on a hidden axis from 0 to 1.
TOP, BOTTOM = 0.975, 0.025


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's line.

    Attributes:
        x, y: float64[N]; y may hold NaN and infinities, which are marked.
        smooth_x, smooth_y: the strong line, if any; y is then drawn faintly.
        arm: the label in the legend; curves of one arm share an entry.
        quiet: drawn thin, in the background.
        places: where the steps of its run are.
    """

    name: str
    arm: str
    slot: Slot
    x: Floats
    y: Floats
    smooth_x: Floats = field(default_factory=lambda: np.zeros(0))
    smooth_y: Floats = field(default_factory=lambda: np.zeros(0))
    quiet: bool = False
    run_id: UUID | None = None
    places: StepPlaces | None = None


def curves_figure(
    curves: Sequence[Curve],
    theme: Theme,
    *,
    y_range: Range | None = None,
    log: bool = False,
    compact: bool = False,
    height: int = 340,
    x_title: str = "step",
    y_title: str = "",
    marks: Sequence[Mark] = (),
    is_dated: bool = False,
    picks_steps: bool = False,
) -> PlainFigure:
    """Draw curves in one chart.

    Values outside `y_range` and values that are not finite are marked at the edge, with the value in the
    hover text. A log axis leaves out values <= 0 and contains all others. With `is_dated`, x counts the
    milliseconds of a clock. With `picks_steps`, the page can tell the step of each point, also over another
    axis than steps; all curves are then of one run, but for those in the background.
    """
    layout = base_layout(theme, compact=compact, height=height, x_title=x_title, y_title=y_title)
    parts = _Parts()
    named: dict[str, None] = {}
    arms = {curve.arm for curve in curves if not curve.quiet}
    for curve in curves:
        # Dashes distinguish arms; a single line is solid.
        dash = DASHES[curve.slot] if len(arms) > 1 else "solid"
        lines = len(parts.traces)
        _draw(parts, curve, theme, dash, log=log, legend=curve.arm not in named)
        named[curve.arm] = None
        if picks_steps and x_title != "step" and not curve.quiet and curve.places is not None:
            # For marks.js, which asks the first such line.
            parts.traces[lines] |= {"customdata": curve.places.drawn_steps, "meta": {"steps": True}}
            picks_steps = False
    ends = [(float(curve.x[0]), float(curve.x[-1])) for curve in curves if len(curve.x)]
    first, last = min((end[0] for end in ends), default=0.0), max((end[1] for end in ends), default=0.0)
    # Marks at the ends would make plotly widen the axis.
    if x_title == "step" and ends:
        layout["xaxis"] |= steps_axis(first, last)
    elif last > first:
        layout["xaxis"] |= {"range": [first, last]}
    if is_dated:
        layout["xaxis"] |= {"type": "date"}
    for curve in curves:
        _mark_hidden_values(parts, curve, theme, y_range)
    draw_marks(parts, marks, theme, axis="y2", height=BOTTOM)
    if log:
        layout["yaxis"] |= {"type": "log", "minor": {"ticks": ""}, "dtick": _decades(curves)}
    elif y_range is not None:
        layout["yaxis"] |= {"range": list(y_range), "autorange": False}
    layout |= {
        "shapes": parts.shapes,
        "showlegend": len(named) > 1,
        "yaxis2": {
            "overlaying": "y",
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
            "type": "linear",
        },
    }
    if len(named) > 1:
        make_room_for_legend(layout, named, compact=compact)
    return PlainFigure(parts.traces, layout)


@dataclass
class _Parts:
    """The additions to a figure."""

    traces: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)

    def add_scatter(self, **trace: Any) -> None:
        self.traces.append(
            {"type": "scatter", **{key: value for key, value in trace.items() if value is not None}}
        )

    def add_shape(self, **shape: Any) -> None:
        self.shapes.append(shape)


def _draw(figure: _Parts, curve: Curve, theme: Theme, dash: str, *, log: bool, legend: bool) -> None:
    colour = theme.arms[curve.slot]
    has_smooth = len(curve.smooth_x) > 0
    width = 1.2 if curve.quiet else 2.2
    # Plotly leaves out NaN and infinities; downloads of the data need them.
    y = np.where(curve.y <= 0, np.nan, curve.y) if log else curve.y
    raw_colour = faded(colour, (0.2 if curve.quiet else 0.38) if has_smooth else 0.55 if curve.quiet else 1.0)
    figure.add_scatter(
        x=curve.x,
        y=y,
        name=curve.name if not has_smooth else f"{curve.name}, raw",
        mode="lines" if np.count_nonzero(np.isfinite(y)) > 1 else "markers",
        line={
            "color": raw_colour,
            "width": 1 if has_smooth else width,
            "dash": "solid" if has_smooth else dash,
        },
        marker={"color": colour, "size": 7},
        legendgroup=curve.arm,
        showlegend=False,
        hoverinfo="skip" if has_smooth else None,
        hovertemplate=None if has_smooth else f"%{{y:.5~g}}<extra>{escaped(curve.name)}</extra>",
        connectgaps=False,
    )
    if has_smooth:
        smooth = np.where((curve.smooth_y > 0) | (not log), curve.smooth_y, np.nan)
        figure.add_scatter(
            x=curve.smooth_x,
            y=smooth,
            mode="lines",
            line={"color": faded(colour, 0.75) if curve.quiet else colour, "width": width, "dash": dash},
            legendgroup=curve.arm,
            showlegend=False,
            name=curve.name,
            hovertemplate=f"%{{y:.5~g}}<extra>{escaped(curve.name)}</extra>",
            connectgaps=False,
        )
    if legend:
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="lines",
            name=escaped(curve.arm),
            legendgroup=curve.arm,
            line={"color": colour, "width": 2.6, "dash": dash},
        )


def _mark_hidden_values(figure: _Parts, curve: Curve, theme: Theme, y_range: Range | None) -> None:
    """Mark values that are not finite with crosses, and values outside the range with triangles."""
    broken = ~np.isfinite(curve.y)
    if broken.any():
        text = ["NaN" if np.isnan(value) else "infinite" for value in curve.y]
        _edge_marks(figure, curve, broken, text, theme.danger, "x-thin", TOP, "not finite")
    if y_range is None:
        return
    with np.errstate(invalid="ignore"):
        above, below = (curve.y > y_range[1]) & ~broken, (curve.y < y_range[0]) & ~broken
    if not (above.any() or below.any()):
        return
    text = [f"{value:.5g}" for value in curve.y]
    colour = theme.arms[curve.slot]
    _edge_marks(figure, curve, above, text, colour, "triangle-up", TOP, "above the chart")
    _edge_marks(figure, curve, below, text, colour, "triangle-down", BOTTOM, "below the chart")


def _edge_marks(
    figure: _Parts,
    curve: Curve,
    mask: NDArray[np.bool_],
    text: Sequence[str],
    colour: str,
    symbol: str,
    height: float,
    reason: str,
) -> None:
    """Mark both ends of each stretch in which `mask` is true, and join them with a line."""
    if not mask.any():
        return
    x: list[float | None] = []
    labels: list[str] = []
    for first, last in stretches(mask):
        x += [float(curve.x[first]), float(curve.x[last]), None]
        labels += [text[first], text[last], ""]
    figure.add_scatter(
        x=x,
        y=[None if value is None else height for value in x],
        yaxis="y2",
        mode="lines+markers",
        line={"color": faded(colour, 0.8), "width": 2},
        marker={"symbol": symbol, "size": 9, "color": colour, "line": {"width": 2, "color": colour}},
        text=labels,
        name=f"{curve.name}: {reason}",
        legendgroup=curve.arm,
        showlegend=False,
        hovertemplate=f"%{{text}}<extra>{escaped(curve.name)}, {reason}</extra>",
        cliponaxis=False,
    )


def _decades(curves: Sequence[Curve]) -> str | int | None:
    """Ticks at powers of ten if the values span several, else plotly's default."""
    positive = [curve.y[np.isfinite(curve.y) & (curve.y > 0)] for curve in curves]
    positive = [values for values in positive if len(values)]
    if not positive:
        return None
    low, high = min(values.min() for values in positive), max(values.max() for values in positive)
    return 1 if np.log10(high / low) > 2.5 else None
