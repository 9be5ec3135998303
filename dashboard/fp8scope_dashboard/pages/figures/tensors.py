"""Figures of tensors: the heat map of many, and the details of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from fp8scope_dashboard.analysis.tensor_onsets import is_rate
from fp8scope_dashboard.analysis.what_if.formats import format_named
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.figures.theme import Theme, escaped, faded, new_figure, scale_of
from fp8scope_dashboard.pages.tensors.modes import decades_of, scale_of_values
from fp8scope_dashboard.text.ticks import ticks

Floats = NDArray[np.float64]

ROW_PIXELS, LEAST_PIXELS, MOST_PIXELS = 15, 260, 900
# With more rows there is no space for names.
NAMED_ROWS = 70
LABEL_LENGTH, COMPACT_LABEL_LENGTH = 34, 18


def heatmap_figure(
    names: Sequence[str],
    step_edges: NDArray[np.int64],
    values: Floats,
    statistic: str,
    theme: Theme,
    *,
    compact: bool = False,
) -> go.Figure:
    """A statistic of T tensors over C columns of steps; float64[T, C], NaN where there is no value.

    The colour scale is logarithmic. Zero has the colour of the background.
    """
    centres = (step_edges[:-1] + step_edges[1:] - 1) / 2.0
    z, ticks, labels = _levels(values, statistic)
    height = int(np.clip(ROW_PIXELS * len(names) + 90, LEAST_PIXELS, MOST_PIXELS))
    figure = new_figure(theme, compact=compact, height=height, x_title="step")
    colours = theme.heat if is_rate(statistic) or statistic in ("saturated", "nonfinite") else theme.cool
    title = glossary.title(statistic)
    figure.add_heatmap(
        x=centres,
        y=np.arange(len(names)),
        z=z.astype(np.float32),
        customdata=values.astype(np.float32),
        text=None,
        colorscale=scale_of(colours),
        zmin=float(np.float32(ticks[0])),
        zmax=float(np.float32(ticks[-1])),
        xgap=0,
        ygap=1 if len(names) <= NAMED_ROWS else 0,
        hoverongaps=False,
        hovertemplate="<b>%{y}</b><br>step %{x:.0f}<br>" + title + " %{customdata:.4~g}<extra></extra>",
        colorbar=colour_bar(ticks, labels, theme, compact=compact),
    )
    name_rows(figure, names, theme, compact=compact)
    figure.update_yaxes(showticklabels=len(names) <= NAMED_ROWS)
    figure.update_layout(
        hovermode="closest",
        margin={"t": 44 if compact else 10, "r": 8, "l": 8, "b": 40},
        plot_bgcolor=theme.surface,
    )
    return figure


def name_rows(figure: go.Figure, names: Sequence[str], theme: Theme, *, compact: bool) -> None:
    """Name the rows of a heat map, the first one at the top."""
    length = COMPACT_LABEL_LENGTH if compact else LABEL_LENGTH
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=[escaped(shortened(name, length)) for name in (_abbreviated(names) if compact else names)],
        ticks="",
        tickfont={"size": 9 if compact else 10.5, "color": theme.muted},
    )


def colour_bar(
    ticks: Sequence[float], labels: Sequence[str], theme: Theme, *, compact: bool
) -> dict[str, Any]:
    """The colour bar at the right, or above the map on narrow screens."""
    position: dict[str, Any] = {"len": 1.0, "x": 1.005, "xpad": 4, "ypad": 0}
    if compact:
        position = {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
            "len": 1.0,
            "ypad": 2,
        }
    return {
        "tickvals": ticks,
        "ticktext": labels,
        "thickness": 10,
        "outlinewidth": 0,
        "tickfont": {"size": 11, "color": theme.muted},
        **position,
    }


def shortened(name: str, length: int) -> str:
    """Shorten a tensor's name in the middle, because its start and end identify it."""
    if len(name) <= length:
        return name
    head = (length - 1) // 3
    return f"{name[:head]}…{name[-(length - 1 - head) :]}"


def _abbreviated(names: Sequence[str]) -> list[str]:
    """Names for narrow screens: without a common first part, and with abbreviated roles."""
    roles = {"input": "in", "weight": "w", "grad_output": "g", "output": "out"}
    heads = {name.partition(".")[0] for name in names}
    short = []
    for name in names:
        rest = name.partition(".")[2] if len(heads) == 1 and "." in name else name
        stem, dot, role = rest.rpartition(".")
        short.append(f"{stem}{dot}{roles.get(role, role)}")
    return short


def _levels(values: Floats, statistic: str) -> tuple[Floats, list[float], list[str]]:
    """The colour level of each value, and the ticks of the colour bar; the first tick is zero."""
    scale = scale_of_values(values, statistic)
    low, high, labels = scale.low, scale.high, [label for _, label in scale.marks]
    steps = [float(step) for step in np.linspace(low, high, len(labels) - 1)]
    zero = low - (high - low) / 5.0
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.clip(np.log10(values), low, high)
    z = np.where(values == 0, zero, z)
    z = np.where(np.isnan(values), np.nan, z)
    has_zero = is_rate(statistic) or bool((values == 0).any())
    return (z, [zero, *steps], labels) if has_zero else (z, steps, labels[1:])


@dataclass(frozen=True)
class TensorLines:
    """The series of one tensor: per statistic, steps int64[N] and values float64[N]."""

    name: str
    format: str
    lines: Mapping[str, tuple[NDArray[np.int64], Floats]]


def tensor_figure(tensor: TensorLines, theme: Theme, *, compact: bool = False) -> go.Figure:
    """amax and the largest representable value, with the rates below."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09, row_heights=[0.56, 0.44])
    base = new_figure(theme, compact=compact, height=420, x_title="")
    figure.update_layout(base.layout)
    figure.update_xaxes(base.layout.xaxis)
    figure.update_yaxes(base.layout.yaxis)
    _amax(figure, tensor, theme)
    _rates(figure, tensor, theme)
    figure.update_yaxes(
        type="log",
        title_text="" if compact else "amax",
        tickformat="~g",
        **_amax_ticks(tensor),
        row=1,
        col=1,
    )
    figure.update_yaxes(
        title_text="" if compact else "share of elements", rangemode="tozero", tickformat=".3~p", row=2, col=1
    )
    figure.update_xaxes(title_text="step", row=2, col=1)
    figure.update_layout(showlegend=True, margin={"t": 44, "r": 10, "l": 44 if compact else 60, "b": 40})
    return figure


def _amax_ticks(tensor: TensorLines) -> dict[str, Any]:
    """One tick per decade if amax spans several, else 1, 2 and 5 of each; within one, round numbers."""
    _, amax = tensor.lines.get("amax", (None, np.zeros(0)))
    low, high = decades_of(amax[np.isfinite(amax) & (amax > 0)])
    if high - low > 0.8:
        return {"dtick": 1 if high - low > 1.2 else "D2"}
    return {"tickvals": ticks(10.0**low, 10.0**high), "minor": {"ticks": ""}}


def _amax(figure: go.Figure, tensor: TensorLines, theme: Theme) -> None:
    limits = format_named(tensor.format)
    if "scale" in tensor.lines and limits is not None:
        steps, scale = tensor.lines["scale"]
        with np.errstate(divide="ignore", invalid="ignore"):
            largest = np.where(scale > 0, limits.largest / scale, np.nan)
        figure.add_scatter(
            x=steps,
            y=largest,
            name="largest representable",
            mode="lines",
            row=1,
            col=1,
            line={"color": theme.muted, "width": 1.6, "dash": "dash", "shape": "hv"},
            hovertemplate="%{y:.4~g}<extra>largest representable</extra>",
        )
    if "amax" in tensor.lines:
        steps, amax = tensor.lines["amax"]
        figure.add_scatter(
            x=steps,
            y=np.where(amax > 0, amax, np.nan),
            name="amax",
            mode="lines",
            row=1,
            col=1,
            line={"color": theme.text, "width": 1.6},
            hovertemplate="%{y:.4~g}<extra>amax</extra>",
        )


def _rates(figure: go.Figure, tensor: TensorLines, theme: Theme) -> None:
    for name, colour, dash in (
        ("overflow_rate", theme.danger, "solid"),
        ("underflow_rate", theme.warning, "dash"),
        ("subnormal_rate", theme.muted, "dot"),
    ):
        if name in tensor.lines:
            steps, values = tensor.lines[name]
            figure.add_scatter(
                x=steps,
                y=values,
                name=glossary.title(name).lower(),
                mode="lines",
                row=2,
                col=1,
                line={"color": colour, "width": 1.8, "dash": dash},
                fill="tozeroy" if name == "overflow_rate" else None,
                fillcolor=faded(colour, 0.12),
                hovertemplate="%{y:.4~p}<extra>" + glossary.title(name) + "</extra>",
            )
