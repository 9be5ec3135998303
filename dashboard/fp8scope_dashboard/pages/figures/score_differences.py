"""The figure of paired differences: FP8 - BF16 at each checkpoint against the margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages.figures.ranges import PADDING
from fp8scope_dashboard.pages.figures.theme import Slot, Theme, escaped, faded, new_figure

SYMBOLS = {"bf16": "circle", "fp8-1": "diamond"}


@dataclass(frozen=True)
class DifferencePoint:
    """A run's difference to BF16 at one checkpoint, its interval, and the margin there.

    `run` is its id, because several runs may have one name.
    """

    step: int
    name: str
    arm: str
    slot: Slot
    difference: float
    low: float
    high: float
    margin: float
    run: str = ""


def differences_figure(
    points: Sequence[DifferencePoint],
    theme: Theme,
    *,
    y_title: str,
    in_percent: bool,
    compact: bool = False,
    height: int = 320,
) -> go.Figure:
    """A point with its interval for each run and checkpoint, over the zone of the margin."""
    figure = new_figure(theme, compact=compact, height=height, x_title="checkpoint (step)", y_title=y_title)
    steps = sorted({point.step for point in points})
    position = {step: place for place, step in enumerate(steps)}
    for step in steps:
        margin = max(point.margin for point in points if point.step == step)
        figure.add_shape(
            type="rect",
            x0=position[step] - 0.5,
            x1=position[step] + 0.5,
            y0=-margin,
            y1=margin,
            fillcolor=faded(theme.good, 0.13),
            line={"width": 0},
            layer="below",
        )
    figure.add_hline(y=0, line={"color": theme.muted, "width": 1})
    runs = list(dict.fromkeys((point.run, point.name) for point in points))
    offsets = np.linspace(-0.24, 0.24, len(runs)) if len(runs) > 1 else np.zeros(1)
    named: set[str] = set()
    for (run, name), offset in zip(runs, offsets, strict=True):
        mine = [point for point in points if (point.run, point.name) == (run, name)]
        first = mine[0]
        figure.add_scatter(
            x=[position[point.step] + offset for point in mine],
            y=[point.difference for point in mine],
            error_y={
                "type": "data",
                "array": [point.high - point.difference for point in mine],
                "arrayminus": [point.difference - point.low for point in mine],
                "color": theme.arms[first.slot],
                "thickness": 1.6,
                "width": 4,
            },
            mode="markers",
            name=escaped(first.arm),
            legendgroup=first.arm,
            showlegend=first.arm not in named,
            marker={
                "color": theme.arms[first.slot],
                "size": 9,
                "symbol": SYMBOLS.get(first.slot, "square"),
            },
            customdata=[[point.step, point.low, point.high] for point in mine],
            hovertemplate=_hover(name, in_percent),
        )
        named.add(first.arm)
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(steps))),
        ticktext=[str(step) for step in steps],
        range=[-0.6, max(len(steps), 1) - 0.4],
    )
    values = [value for point in points for value in (point.low, point.high, point.margin, -point.margin)]
    low, high = min(values), max(values)
    room = PADDING * ((high - low) or 1.0)
    figure.update_yaxes(range=[low - room, high + room], tickformat="+.2~%" if in_percent else "+.3~g")
    figure.update_layout(hovermode="closest", showlegend=True)
    return figure


def _hover(name: str, in_percent: bool) -> str:
    form = "+.2~%" if in_percent else "+.4~g"
    return (
        f"%{{y:{form}}} [%{{customdata[1]:{form}}}, %{{customdata[2]:{form}}}]"
        f"<br>step %{{customdata[0]}}<extra>{escaped(name)}</extra>"
    )
