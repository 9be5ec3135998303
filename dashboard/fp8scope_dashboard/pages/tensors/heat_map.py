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
from fp8scope_dashboard.pages.charts.theme import (
    Theme,
    escaped,
    faded,
    new_figure,
    scale_of,
    shortened,
    steps_axis,
)
from fp8scope_dashboard.pages.tensors.modes import scale_of_values
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.ticks import ticks

ROW_PIXELS, MIN_PIXELS, MAX_PIXELS = 15, 260, 900
# With more rows there is no space for names.
NAMED_ROWS = 70
LABEL_LENGTH, COMPACT_LABEL_LENGTH = 34, 20


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
    height = int(np.clip(ROW_PIXELS * len(names) + 90, MIN_PIXELS, MAX_PIXELS))
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
    labels = short_labels(_abbreviated(names) if compact else names, length)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=[escaped(label) for label in labels],
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


def short_labels(names: Sequence[str], length: int) -> list[str]:
    """Labels of about `length` characters that tell the names apart.

    Of long names the parts that all of them share are left out, the first ones first. What is still too long
    is shortened in the middle, less so where two names would look alike.
    """
    for only_first in (True, False):
        if any(len(name) > length for name in names):
            names = _without_shared_parts(names, only_first=only_first)
    for most in range(length, max((len(name) for name in names), default=0), 4):
        labels = [shortened(name, most) for name in names]
        if len(set(labels)) == len(set(names)):
            return labels
    return list(names)


def _without_shared_parts(names: Sequence[str], *, only_first: bool) -> list[str]:
    """Dotted names without the parts that all have at the same depth, or without the first of these."""
    split = [name.split(".") for name in names]
    depths = {len(parts) for parts in split}
    shared = {depth for depth in range(min(depths) - 1) if len({parts[depth] for parts in split}) == 1}
    if only_first or len(depths) > 1:
        # At another depth, a part of names that are not equally deep means something else.
        shared = {depth for depth in shared if set(range(depth)) <= shared}
    return [".".join(part for depth, part in enumerate(parts) if depth not in shared) for parts in split]


def _abbreviated(names: Sequence[str]) -> list[str]:
    """Names for narrow screens: without their common first parts, and with abbreviated roles."""
    roles = {"input": "in", "weight": "w", "grad_output": "grad", "output": "out"}
    short = []
    for name in _without_shared_parts(names, only_first=True) if names else ():
        stem, dot, role = name.rpartition(".")
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
        **_amax_axis(tensor),
        row=1,
        col=1,
    )
    figure.update_yaxes(
        title_text="" if compact else "share of elements", rangemode="tozero", tickformat=".3~p", row=2, col=1
    )
    steps = [steps for steps, _ in tensor.lines.values() if len(steps)]
    if steps:
        ends = min(int(other[0]) for other in steps), max(int(other[-1]) for other in steps)
        figure.update_xaxes(**steps_axis(*ends))
    figure.update_xaxes(title_text="step", row=2, col=1)
    figure.update_layout(showlegend=True, margin={"t": 44, "r": 10, "l": 44 if compact else 60, "b": 40})
    return figure


def _amax_axis(tensor: TensorLines) -> dict[str, Any]:
    """Range and ticks: one tick per decade over several, else 1, 2 and 5 of each; within one, round numbers.

    All of amax is within the range, and the largest representable value from its second point on: with
    delayed scaling the first scale is 1, whatever the tensor holds.
    """
    low, high = _decades_of_amax(tensor)
    room = 0.06 * (high - low)
    axis: dict[str, Any] = {"range": [low - room, high + room]}
    if high - low > 0.8:
        return axis | {"dtick": 1 if high - low > 1.2 else "D2"}
    return axis | {"tickvals": ticks(10.0**low, 10.0**high), "minor": {"ticks": ""}}


def _decades_of_amax(tensor: TensorLines) -> tuple[float, float]:
    """log10 of the ends of what the chart of amax shows."""
    parts = [tensor.lines["amax"][1]] if "amax" in tensor.lines else []
    if (limit := _largest(tensor)) is not None:
        largest = limit[1]
        parts.append(largest[1:] if len(largest) > 1 else largest)
    values = np.concatenate([*parts, np.zeros(0)])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(np.log10(values.min())), float(np.log10(values.max()))
    return (low, high) if high - low > 0.3 else (low - 0.15, low + 0.3)


def _largest(tensor: TensorLines) -> tuple[NDArray[np.int64], Floats] | None:
    """The largest value that the format represents, by step; None if it or the scale is not known."""
    limits = format_named(tensor.format)
    if "scale" not in tensor.lines or limits is None:
        return None
    steps, scale = tensor.lines["scale"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return steps, np.where(scale > 0, limits.largest / scale, np.nan)


def _amax(figure: go.Figure, tensor: TensorLines, theme: Theme) -> None:
    limit = _largest(tensor)
    if limit is not None:
        steps, largest = limit
        figure.add_scatter(
            x=steps,
            y=largest,
            name="largest representable",
            mode=_mode(steps),
            marker={"color": theme.muted, "size": 6},
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
            mode=_mode(steps),
            marker={"color": theme.text, "size": 6},
            row=1,
            col=1,
            line={"color": theme.text, "width": 1.6},
            hovertemplate="%{y:.4~g}<extra>amax</extra>",
        )


def _mode(steps: NDArray[np.int64]) -> str:
    """A line through one point would not be seen."""
    return "lines" if len(steps) > 1 else "markers"


def _rates(figure: go.Figure, tensor: TensorLines, theme: Theme) -> None:
    for name, colour, dash in (
        ("overflow_rate", theme.danger, "solid"),
        ("saturation_rate", theme.danger, "solid"),
        ("underflow_rate", theme.warning, "dash"),
        ("subnormal_rate", theme.muted, "dot"),
    ):
        if name in tensor.lines:
            steps, values = tensor.lines[name]
            figure.add_scatter(
                x=steps,
                y=values,
                name=glossary.title(name).lower(),
                mode=_mode(steps),
                marker={"color": colour, "size": 6},
                row=2,
                col=1,
                line={"color": colour, "width": 1.8, "dash": dash},
                fill="tozeroy" if name in ("overflow_rate", "saturation_rate") else None,
                fillcolor=faded(colour, 0.12),
                hovertemplate="%{y:.4~p}<extra>" + glossary.title(name) + "</extra>",
            )
