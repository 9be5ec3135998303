"""The shares of a step's parts, stacked, over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import plotly.graph_objects as go

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.theme import Theme, faded, make_room_for_legend, new_figure, steps_axis
from fp8scope_dashboard.pages.run.anatomy.parts import PARTS, Shares, scalar_of

# How opaque the areas are: shades of the text for the work, of the warning for what is waited for.
WORK_SHADES: Final[Mapping[str, float]] = {
    "forward": 0.75,
    "loss": 0.6,
    "backward": 0.45,
    "optimizer": 0.3,
    "rest": 0.12,
}
WAIT_SHADES: Final[Mapping[str, float]] = {
    "data": 1.0,
    "copy": 0.75,
    "communication": 0.5,
    "checkpoint": 0.3,
}


def anatomy_figure(shown: Shares, theme: Theme, *, compact: bool, height: int = 300) -> go.Figure:
    """Draw the stack of the parts that take any time. `shown` must not be empty."""
    figure = new_figure(theme, compact=compact, height=height, x_title="step", y_title="share of the step")
    drawn = [
        (part, shares) for part, shares in zip(PARTS, shown.shares, strict=True) if float(shares.max()) > 0
    ]
    for part, shares in drawn:
        name = glossary.title(scalar_of(part))
        waits = part in WAIT_SHADES
        shade = WAIT_SHADES[part] if waits else WORK_SHADES[part]
        figure.add_scatter(
            x=shown.x,
            y=shares,
            name=name,
            mode="lines",
            stackgroup="step",
            line={"color": theme.surface, "width": 0.5},
            fillcolor=faded(theme.warning if waits else theme.text, shade),
            hovertemplate=f"%{{y:.1%}}<extra>{name}</extra>",
        )
    layout = {"height": height, "margin": figure.layout.margin.to_plotly_json()}
    make_room_for_legend(layout, [glossary.title(scalar_of(part)) for part, _ in drawn], compact=compact)
    figure.update_layout(legend={"traceorder": "normal"}, **layout)
    figure.update_xaxes(**steps_axis(float(shown.x[0]), float(shown.x[-1])))
    figure.update_yaxes(range=[0, 1], autorange=False, tickformat=".0%")
    return figure
