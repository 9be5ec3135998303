"""The phases of a training step, stacked, over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.theme import Theme, faded, new_figure
from fp8scope_dashboard.pages.run.efficiency import PHASES, Split

# How opaque the areas are: shades of one colour, because arms have the others. Waiting for data stands out.
SHADES: Final[Mapping[str, float]] = {
    "time_forward": 0.75,
    "time_backward": 0.5,
    "time_optimizer": 0.3,
    "time_other": 0.16,
}
# A step that saves a checkpoint must not flatten all others.
HEADROOM = 3.0


def top_of(split: Split) -> float:
    """The upper limit of the axis: the longest step, or HEADROOM times the median step."""
    total = split.total
    return float(min(total.max(), HEADROOM * np.median(total)) * 1.06)


def efficiency_figure(split: Split, theme: Theme, *, compact: bool, height: int = 320) -> go.Figure:
    """Draw the stack, in milliseconds if steps take less than a second. `split` must not be empty."""
    top = top_of(split)
    unit, factor = ("ms", 1e3) if top < 1 else ("s", 1.0)
    figure = new_figure(theme, compact=compact, height=height, x_title="step", y_title=f"{unit} / step")
    for name, seconds in zip(PHASES, split.seconds, strict=True):
        waits = name not in SHADES
        figure.add_scatter(
            x=split.x,
            y=seconds * factor,
            name=glossary.title(name),
            mode="lines",
            stackgroup="step",
            line={"color": theme.surface, "width": 0.5},
            fillcolor=theme.warning if waits else faded(theme.text, SHADES[name]),
            hovertemplate=f"%{{y:.3~s}} {unit}<extra>{glossary.title(name)}</extra>",
        )
    figure.update_yaxes(range=[0, top * factor], autorange=False)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure
