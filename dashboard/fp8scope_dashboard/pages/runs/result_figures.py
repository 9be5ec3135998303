"""Figures of settings against results: a scatter plot, and parallel coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fp8scope_dashboard.pages.charts.theme import Slot, Theme, escaped, faded, new_figure, shortened
from fp8scope_dashboard.pages.formatting import number
from fp8scope_dashboard.pages.runs.result_values import ValueAxis
from fp8scope_dashboard.statistics.arrays import Floats

NAME_LENGTH: Final = 60
# Lines of parallel coordinates have as many colours, from the lowest result to the highest.
SHADES: Final = 8
# Of the lines of many runs.
MIN_ALPHA: Final = 0.18
# So many different numbers have a tick each.
FEW_VALUES: Final = 8
# Room at the top and the bottom of an axis, as a share.
EDGE: Final = 0.04


def scatter_figure(
    setting: ValueAxis,
    result: ValueAxis,
    runs: Sequence[tuple[str, Slot, str]],
    theme: Theme,
    *,
    compact: bool,
) -> go.Figure:
    """The result of each run over a setting.

    Args:
        runs: of each run its name, the slot of its colour, and the address of its page.
    """
    figure = new_figure(theme, compact=compact, height=400, x_title=setting.title, y_title=result.title)
    is_shown = np.isfinite(setting.positions) & np.isfinite(result.positions)
    shown: list[int] = np.flatnonzero(is_shown).tolist()
    texts = [
        "<br>".join([_short(runs[i][0]), *(_labelled(axis, i) for axis in (setting, result))]) for i in shown
    ]
    figure.add_scatter(
        x=setting.positions[shown],
        y=result.positions[shown],
        mode="markers",
        name=escaped(result.title),
        marker={
            "size": 9,
            "color": [theme.arms[runs[i][1]] for i in shown],
            "line": {"width": 1, "color": theme.surface},
        },
        text=texts,
        customdata=[runs[i][2] for i in shown],
        hovertemplate="%{text}<extra></extra>",
    )
    figure.update_layout(hovermode="closest", showlegend=False)
    figure.update_xaxes(**_ticks(setting), showgrid=True)
    figure.update_yaxes(**_ticks(result))
    return figure


def _short(name: str) -> str:
    return escaped(shortened(name, NAME_LENGTH))


def _labelled(axis: ValueAxis, index: int) -> str:
    return f"{escaped(axis.title)} {escaped(axis.label(index))}"


def _ticks(axis: ValueAxis) -> dict[str, Any]:
    if not axis.texts:
        kind = {"type": "log"} if axis.is_log else {}
        values = np.unique(axis.positions[np.isfinite(axis.positions)])
        if len(values) > FEW_VALUES:
            return {**kind, "exponentformat": "power"}
        return {
            **kind,
            "tickmode": "array",
            "tickvals": values,
            "ticktext": [number(float(value)) for value in values],
        }
    count = len(axis.texts)
    labels = [escaped(shortened(text, 18)) for text in axis.texts]
    return {
        "tickmode": "array",
        "tickvals": list(range(count)),
        "ticktext": labels,
        "range": [-0.5, count - 0.5],
    }


def parallel_figure(
    axes: Sequence[ValueAxis], result: ValueAxis, names: Sequence[str], theme: Theme, *, compact: bool
) -> go.Figure:
    """A line for each run through its settings to its result, in the colour of the result."""
    height = 400
    figure = new_figure(theme, compact=compact, height=height)
    drawn = [*axes, result]
    places = np.array([_places(axis) for axis in drawn])
    shades = _shades(result)
    alpha = max(MIN_ALPHA, min(0.75, 12.0 / max(1.0, float(np.count_nonzero(shades >= 0))) ** 0.7))
    # The extremes last, so that they are in front.
    for shade in sorted(range(SHADES), key=lambda shade: (abs(2 * shade - SHADES + 1), -shade)):
        colour = _mixed(theme, shade / (SHADES - 1))
        members = np.flatnonzero(shades == shade)
        if not len(members):
            continue
        x: list[float | None] = []
        y: list[float | None] = []
        texts: list[str] = []
        for run in members.tolist():
            finite = np.flatnonzero(np.isfinite(places[:, run]))
            name = _short(names[run])
            x += [*finite.astype(float).tolist(), None]
            y += [*places[finite, run].tolist(), None]
            texts += [
                f"{name}<br>{escaped(drawn[i].title)} {escaped(drawn[i].label(int(run)))}" for i in finite
            ]
            texts.append("")
        figure.add_scatter(
            x=x,
            y=y,
            text=texts,
            mode="lines+markers",
            line={"color": faded(colour, alpha), "width": 1.6},
            marker={"color": colour, "size": 4},
            name=_range_of(result, members),
            hovertemplate="%{text}<extra></extra>",
            connectgaps=False,
        )
    _draw_axes(figure, drawn, theme, compact=compact)
    return figure


def _draw_axes(figure: go.Figure, axes: Sequence[ValueAxis], theme: Theme, *, compact: bool) -> None:
    notes: list[dict[str, Any]] = []
    for index, axis in enumerate(axes):
        labels = _labels(axis)
        for at, label in [*labels[:1], *labels[-1:]] if compact else labels:
            notes.append(
                {
                    "x": index,
                    "y": at,
                    "text": escaped(shortened(label, 6 if compact else 14)),
                    "bgcolor": faded(theme.surface, 0.75),
                    "xanchor": "right" if index == len(axes) - 1 else "left",
                    "yanchor": "bottom",
                    "xshift": -4 if index == len(axes) - 1 else 4,
                    "showarrow": False,
                    "font": {"size": 10, "color": theme.muted},
                }
            )
    lines = [
        {
            "type": "line",
            "x0": index,
            "x1": index,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"color": theme.muted, "width": 1},
        }
        for index in range(len(axes))
    ]
    titles = [escaped(shortened(axis.title, 12 if compact else 24)) for axis in axes]
    figure.update_layout(annotations=notes, shapes=lines, hovermode="closest", showlegend=False)
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(axes))),
        ticktext=titles,
        range=[-0.08, len(axes) - 0.92],
        fixedrange=True,
    )
    figure.update_yaxes(visible=False, range=[-EDGE, 1 + 2 * EDGE], fixedrange=True)


def _places(axis: ValueAxis) -> Floats:
    """Positions as shares of the axis, from 0 to 1."""
    if axis.texts:
        return axis.positions / max(1, len(axis.texts) - 1)
    values = np.log(axis.positions) if axis.is_log else axis.positions
    finite = values[np.isfinite(values)]
    if not len(finite):
        return values
    low, high = finite.min(), finite.max()
    return np.asarray(
        (values - low) / (high - low) if high > low else np.where(np.isfinite(values), 0.5, np.nan)
    )


def _labels(axis: ValueAxis) -> list[tuple[float, str]]:
    """Texts beside an axis with their places: all texts, or the lowest and the highest number."""
    if axis.texts:
        return [(position / max(1, len(axis.texts) - 1), text) for position, text in enumerate(axis.texts)]
    finite = axis.positions[np.isfinite(axis.positions)]
    if not len(finite):
        return []
    low, high = float(finite.min()), float(finite.max())
    return [(0.0, number(low)), (1.0, number(high))] if high > low else [(0.5, number(low))]


def _shades(result: ValueAxis) -> NDArray[np.int64]:
    """The colour of each run by the rank of its result, so that one extreme does not hide the others."""
    finite = np.isfinite(result.positions)
    shades = np.full(len(finite), -1, np.int64)
    if finite.any():
        values, ranks = np.unique(result.positions[finite], return_inverse=True)
        shades[finite] = ranks * (SHADES - 1) // max(1, len(values) - 1)
    return shades


def _mixed(theme: Theme, share: float) -> str:
    """A colour between those of a low and of a high result."""
    low, high = (
        tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in (theme.arms["bf16"], theme.danger)
    )
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def _range_of(result: ValueAxis, members: NDArray[np.int64]) -> str:
    values = result.positions[members]
    low, high = number(float(values.min())), number(float(values.max()))
    return escaped(f"{result.title} {low}" if low == high else f"{result.title} {low} to {high}")
