"""The phases of a training step, stacked, over steps."""

from __future__ import annotations

from typing import Final

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.efficiency import PHASES, Split
from fp8scope_dashboard.pages.figures.theme import Slot, Theme, faded, new_figure

# Waiting for data stands out. All colours differ for every common form of colour blindness.
COLOURS: Final[dict[str, Slot]] = {
    "time_forward": "bf16",
    "time_backward": "fp8-2",
    "time_optimizer": "fp8-3",
    "time_other": "other",
    "time_data": "fp8-1",
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
        colour = theme.arms[COLOURS[name]]
        figure.add_scatter(
            x=split.x,
            y=seconds * factor,
            name=glossary.title(name),
            mode="lines",
            stackgroup="step",
            line={"color": colour, "width": 1},
            fillcolor=faded(colour, 0.55),
            hovertemplate=f"%{{y:.3~s}} {unit}<extra>{glossary.title(name)}</extra>",
        )
    figure.update_yaxes(range=[0, top * factor], autorange=False)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure
