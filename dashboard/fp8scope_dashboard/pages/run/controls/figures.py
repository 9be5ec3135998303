"""Figures of reports: the two curves of a reference window, and the ranking of a bisection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.pages.charts.ranges import loss_range
from fp8scope_dashboard.pages.charts.theme import Slot, Theme, escaped, faded, new_figure, shortened

PRODUCT_TITLES: Final[Mapping[str, str]] = {
    "fprop": "fprop: the output",
    "dgrad": "dgrad: the input's gradient",
    "wgrad": "wgrad: the weight's gradient",
}
BAR_HEIGHT, MARGINS = 22, 96
NAME_LENGTH, COMPACT_NAME_LENGTH = 44, 20


def window_figure(
    document: Mapping[str, Any], step: int, theme: Theme, *, compact: bool = False
) -> PlainFigure:
    """The losses of a reference window in FP8 and BF16, over the steps of the run."""
    steps = np.arange(step, step + len(document["fp8"]), dtype=np.float64)
    arms: Sequence[tuple[str, str, Slot]] = (
        ("BF16 from the same state", "bf16", "bf16"),
        ("FP8", "fp8", "fp8-1"),
    )
    curves = [
        Curve(
            name=name,
            arm=name,
            slot=slot,
            x=steps,
            y=np.array([float(value) for value in document[key]], np.float64),
        )
        for name, key, slot in arms
    ]
    y_range = loss_range([curve.y for curve in curves])
    return curves_figure(curves, theme, y_range=y_range, compact=compact, height=280, y_title="loss")


def ranking_figure(
    products: Sequence[tuple[str, str, float, float]], total: float, theme: Theme, *, compact: bool = False
) -> go.Figure:
    """Relative errors of (layer, product, error, cosine) as bars, worst first; `total` as a line."""
    figure = new_figure(
        theme,
        compact=compact,
        height=MARGINS + BAR_HEIGHT * max(len(products), 3),
        x_title="relative error of the gradient",
    )
    finite = [error for _, _, error, _ in products if math.isfinite(error) and error > 0]
    largest = max([*finite, total if math.isfinite(total) else 0.0, 1e-12])
    smallest = min([*finite, largest])
    # Not the colours of arms: a product is none. Every bar also has a label.
    colours = {"fprop": theme.muted, "dgrad": theme.text, "wgrad": faded(theme.muted, 0.5)}
    for kind, colour in colours.items():
        rows = [index for index, product in enumerate(products) if product[1] == kind]
        if rows:
            title = kind if compact else PRODUCT_TITLES[kind]
            _add_bars(figure, title, rows, [products[index] for index in rows], colour, largest)
    if math.isfinite(total) and total > 0:
        figure.add_vline(x=total, line={"color": theme.muted, "width": 1.2, "dash": "dash"})
    figure.update_xaxes(
        type="log",
        range=[math.log10(smallest / 2), math.log10(largest * 1.3)],
        tickformat=".2~p",
        # Labels at every digit would overlap.
        dtick=1 if largest > 30 * smallest else "D2",
        showgrid=True,
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(products))),
        ticktext=[_label(layer, product, compact) for layer, product, _, _ in products],
        range=[len(products) - 0.4, -0.6],
    )
    # For the data of the chart, which has full names.
    names = [f"{escaped(layer)} {product}" for layer, product, _, _ in products]
    figure.update_layout(
        hovermode="closest", bargap=0.25, barmode="overlay", dragmode=False, meta={"names": names}
    )
    return figure


def _add_bars(
    figure: go.Figure,
    title: str,
    rows: Sequence[int],
    products: Sequence[tuple[str, str, float, float]],
    colour: str,
    largest: float,
) -> None:
    """Add the bars of one kind of product at their rows. A bar that is not finite is as long as `largest`."""
    figure.add_bar(
        orientation="h",
        y=list(rows),
        x=[error if math.isfinite(error) else largest for _, _, error, _ in products],
        name=title,
        marker={"color": colour, "line": {"width": 0}},
        text=["" if math.isfinite(error) else "not finite" for _, _, error, _ in products],
        customdata=[
            [escaped(layer), kind, _format(error), _format(cosine)] for layer, kind, error, cosine in products
        ],
        hovertemplate="%{customdata[0]} %{customdata[1]}<br>"
        "error %{customdata[2]}, cosine %{customdata[3]}<extra></extra>",
    )


def _label(layer: str, product: str, compact: bool) -> str:
    most = COMPACT_NAME_LENGTH if compact else NAME_LENGTH
    return f"{escaped(shortened(layer, most))} {product}"


def _format(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
