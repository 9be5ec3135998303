"""Figures of a task's checkpoints: the scores of runs, and their differences to BF16, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages.charts.ranges import PADDING
from fp8scope_dashboard.pages.charts.theme import Slot, Theme, escaped, faded, new_figure

SYMBOLS: Final[Mapping[Slot, str]] = {"bf16": "circle", "fp8-1": "diamond"}
# The runs of a checkpoint are drawn side by side over this part of its width.
SPREAD: Final = 0.52


@dataclass(frozen=True, kw_only=True)
class CheckpointPoint:
    """One run at one checkpoint: its score or difference, with its interval if there is one.

    `run` is its id, because several runs may have one name.
    """

    step: int
    name: str
    arm: str
    slot: Slot
    value: float
    low: float | None
    high: float | None
    run: str = ""


@dataclass(frozen=True)
class Zone:
    """A range of values at one checkpoint: the baseline's interval, or the margin around 0."""

    step: int
    low: float
    high: float


def scores_figure(
    points: Sequence[CheckpointPoint],
    bands: Sequence[Zone],
    theme: Theme,
    *,
    y_title: str,
    compact: bool = False,
) -> go.Figure:
    """A point and interval for every run at every checkpoint, over the baseline's interval."""
    figure = new_figure(theme, compact=compact, height=320, x_title="checkpoint (step)", y_title=y_title)
    _draw(figure, points, bands, theme, zone_colour=faded(theme.arms["bf16"], 0.16), value_format=".4~f")
    return figure


def differences_figure(
    points: Sequence[CheckpointPoint],
    margins: Sequence[Zone],
    theme: Theme,
    *,
    in_percent: bool,
    compact: bool = False,
) -> go.Figure:
    """The difference to BF16 of every run at every checkpoint, over the zone of the margin.

    `in_percent`: the values are shares, whose differences are drawn in percentage points.
    """
    title = "FP8 − BF16 (percentage points)" if in_percent else "FP8 − BF16"
    figure = new_figure(theme, compact=compact, height=320, x_title="checkpoint (step)", y_title=title)
    if in_percent:
        points = [_in_hundreds(point) for point in points]
        margins = [replace(zone, low=100 * zone.low, high=100 * zone.high) for zone in margins]
    value_format = "+.2~f" if in_percent else "+.4~g"
    _draw(figure, points, margins, theme, zone_colour=faded(theme.good, 0.13), value_format=value_format)
    figure.add_hline(y=0, line={"color": theme.muted, "width": 1})
    figure.update_yaxes(tickformat=".2~f" if in_percent else ".3~g")
    return figure


def _in_hundreds(point: CheckpointPoint) -> CheckpointPoint:
    low, high = (None if end is None else 100 * end for end in (point.low, point.high))
    return replace(point, value=100 * point.value, low=low, high=high)


def _draw(
    figure: go.Figure,
    points: Sequence[CheckpointPoint],
    zones: Sequence[Zone],
    theme: Theme,
    *,
    zone_colour: str,
    value_format: str,
) -> None:
    intervals: list[CheckpointPoint | Zone] = [*points, *zones]
    steps = sorted({interval.step for interval in intervals})
    position = {step: i for i, step in enumerate(steps)}
    for zone in zones:
        figure.add_shape(
            type="rect",
            x0=position[zone.step] - 0.45,
            x1=position[zone.step] + 0.45,
            y0=zone.low,
            y1=zone.high,
            fillcolor=zone_colour,
            line={"width": 0},
            layer="below",
        )
    runs = list(dict.fromkeys((point.run, point.name) for point in points))
    offsets = np.linspace(-SPREAD / 2, SPREAD / 2, len(runs)) if len(runs) > 1 else np.zeros(1)
    named: set[str] = set()
    for run, offset in zip(runs, offsets, strict=True):
        mine = [point for point in points if (point.run, point.name) == run]
        x = [position[point.step] + float(offset) for point in mine]
        _draw_run(figure, mine, x, theme, value_format, legend=mine[0].arm not in named)
        named.add(mine[0].arm)
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(steps))),
        ticktext=[f"{step:,}" for step in steps],
        range=[-0.6, max(len(steps), 1) - 0.4],
    )
    figure.update_layout(hovermode="closest", showlegend=True)
    _fit(figure, [value for interval in intervals for value in (interval.low, interval.high)], points)


def _draw_run(
    figure: go.Figure,
    points: Sequence[CheckpointPoint],
    x: Sequence[float],
    theme: Theme,
    value_format: str,
    *,
    legend: bool,
) -> None:
    """Draw the points of one run with their whiskers at positions `x`."""
    first = points[0]
    colour = theme.arms[first.slot]
    figure.add_scatter(
        x=x,
        y=[point.value for point in points],
        error_y={
            "type": "data",
            "array": [0.0 if point.high is None else point.high - point.value for point in points],
            "arrayminus": [0.0 if point.low is None else point.value - point.low for point in points],
            "color": colour,
            "thickness": 1.6,
            "width": 4,
        },
        mode="markers",
        name=escaped(first.arm),
        legendgroup=first.arm,
        showlegend=legend,
        marker={"color": colour, "size": 9, "symbol": SYMBOLS.get(first.slot, "square")},
        customdata=[[point.step, point.low, point.high] for point in points],
        hovertemplate=f"%{{y:{value_format}}} [%{{customdata[1]:{value_format}}}, "
        f"%{{customdata[2]:{value_format}}}]<br>step %{{customdata[0]}}<extra>{escaped(first.name)}</extra>",
    )


def _fit(figure: go.Figure, ends: Iterable[float | None], points: Sequence[CheckpointPoint]) -> None:
    """Set the range: plotly's automatic range ignores shapes."""
    present = [value for value in (*ends, *(point.value for point in points)) if value is not None]
    finite = [value for value in present if np.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        room = PADDING * ((high - low) or abs(high) or 1.0)
        figure.update_yaxes(range=[low - room, high + room])
