"""The axes of a figure as plotly shows them: range, ticks and labels. For drawing on the server."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.pages.charts.plain_figure import PlainFigure
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import THIN
from fp8scope_dashboard.text.ticks import MINUS, WHOLE_BELOW, tick_label, ticks

# Space of an automatic range beyond the data, as a share of it.
PADDING: Final = 0.05
PIXELS_PER_TICK: Final = 52
TICKS_ACROSS: Final = 9
DRAWN: Final = frozenset({"scatter", "bar", "heatmap"})


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        start, end: the values at its beginning and end, as powers of ten if logarithmic.
        ticks: values and labels.
    """

    start: float
    end: float
    is_log: bool
    ticks: Sequence[tuple[float, str]]
    title: str
    visible: bool
    grid: bool
    font_size: float

    def share(self, value: float) -> float:
        """The position of a value: 0 at the start, 1 at the end; NaN for none on a logarithmic axis."""
        return float(self.shares(np.array([value]))[0])

    def shares(self, values: Floats) -> Floats:
        """Like `share` of float64[N]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(values > 0, np.log10(values), np.nan) if self.is_log else values
        return np.asarray((scaled - self.start) / (self.end - self.start))


def drawable(figure: PlainFigure) -> bool:
    """Return whether the figure has only traces that are drawn on the server, with numbers on both axes."""
    try:
        for trace in figure.data:
            if trace.type not in DRAWN:
                return False
            floats(trace.x), floats(trace.y)
    except (TypeError, ValueError):
        return False
    return len(figure.data) > 0


def floats(values: Any) -> Floats:
    """The values of a trace as float64[N]; None is NaN.

    Raises:
        ValueError, TypeError: they are no numbers.
    """
    if values is None:
        return np.zeros(0)
    if isinstance(values, np.ndarray) and values.dtype != object:
        return np.asarray(values, np.float64)
    return np.array([math.nan if value is None else value for value in values], np.float64)


def axis_of(figure: PlainFigure, name: str, pixels: float) -> Axis:
    """The axis x, y, y2 and so on. All panels have one horizontal axis, with the range of the first.

    Args:
        pixels: the length of a vertical axis.
    """
    letter = name[0]
    layout = figure.layout[f"{letter}axis{name[1:]}"]
    is_log = layout.type == "log"
    start, end = _range(figure, layout, name, is_log)
    # Of panels above each other, only the lowest shows the title and the labels of their steps.
    shared = [figure.layout[key] for key in figure.layout if key.startswith("xaxis")] if letter == "x" else []
    title = next((axes_layout.title.text for axes_layout in (layout, *shared) if axes_layout.title.text), "")
    shown = any(
        axes_layout.showticklabels is not False and axes_layout.visible is not False
        for axes_layout in (layout, *shared)
    )
    most = TICKS_ACROSS if letter == "x" else layout.nticks or max(2, round(pixels / PIXELS_PER_TICK))
    return Axis(
        start=start,
        end=end,
        is_log=is_log,
        ticks=_ticks(layout, start, end, is_log, most) if shown else (),
        title=title,
        visible=layout.visible is not False,
        grid=layout.showgrid is not False,
        font_size=float(layout.tickfont.size or 11),
    )


def _range(figure: PlainFigure, layout: Any, name: str, is_log: bool) -> tuple[float, float]:
    if layout.range is not None and layout.autorange in (None, False):
        start, end = (float(bound) for bound in layout.range)
    else:
        start, end = _automatic(figure, layout, name, is_log)
        if layout.autorange == "reversed":
            start, end = end, start
    return (start, end) if end != start else (start - 0.5, end + 0.5)


def _automatic(figure: PlainFigure, layout: Any, name: str, is_log: bool) -> tuple[float, float]:
    """Plotly's automatic range: lines fill the horizontal axis, everything else has some space."""
    is_x = name[0] == "x"
    traces = [trace for trace in figure.data if is_x or (trace.yaxis or "y") == name]
    if not is_x and any(trace.type == "heatmap" for trace in traces):
        return -0.5, len(traces[0].y) - 0.5
    parts = [np.zeros(0), *(floats(trace.x if is_x else trace.y) for trace in traces)]
    stacked = [
        floats(trace.y) for trace in traces if not is_x and trace.type == "scatter" and trace.stackgroup
    ]
    if stacked:
        parts.append(np.sum(stacked, axis=0))
    values = np.concatenate(parts)
    values = values[np.isfinite(values) & ((values > 0) | (not is_log))]
    if not len(values):
        return 0.0, 1.0
    values = np.log10(values) if is_log else values
    low, high = float(values.min()), float(values.max())
    from_zero = not is_log and (
        layout.rangemode == "tozero" or any(_begins_at_zero(trace) for trace in traces)
    )
    if from_zero and not is_x:
        low = min(low, 0.0)
    has_marks = any(
        trace.type == "bar" or "markers" in (getattr(trace, "mode", "") or "") for trace in traces
    )
    if is_x and not has_marks:
        return low, high
    room = PADDING * ((high - low) or abs(high) or 1.0)
    return (low if from_zero and low == 0.0 else low - room), high + room


def _begins_at_zero(trace: Any) -> bool:
    return trace.type == "bar" or (trace.type == "scatter" and bool(trace.stackgroup))


def _ticks(layout: Any, start: float, end: float, is_log: bool, most: int) -> list[tuple[float, str]]:
    low, high = min(start, end), max(start, end)
    if layout.tickvals is not None:
        largest = max((abs(float(value)) for value in layout.tickvals), default=0.0)
        texts = (
            layout.ticktext
            if layout.ticktext is not None
            else [formatted(float(value), layout.tickformat, largest) for value in layout.tickvals]
        )
        pairs = [(float(value), str(text)) for value, text in zip(layout.tickvals, texts, strict=False)]
        return [pair for pair in pairs if low - 1e-9 <= (_log(pair[0]) if is_log else pair[0]) <= high + 1e-9]
    values = _log_ticks(low, high, most) if is_log else ticks(low, high, most=most)
    if layout.tickformatstops and len(values) > 1 and 1 <= round(values[1] - values[0]) < WHOLE_BELOW:
        return [(value, f"{value:,.0f}".replace(",", THIN)) for value in values]
    largest = max((abs(value) for value in values), default=0.0)
    return [(value, formatted(value, layout.tickformat, largest)) for value in values]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    if high - low >= 1.5:
        return ticks(10.0**low, 10.0**high, True, most)
    bases = (1, 2, 5) if high - low > 0.9 else range(1, 10)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [base * 10.0**power for power in powers for base in bases]
    return [value for value in values if low <= math.log10(value) <= high]


def _log(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def formatted(value: float, pattern: str | None, largest: float) -> str:
    """A tick in the part of d3's formats that the figures use: sign, digits, ~, and p, %, g, s or f."""
    match = re.fullmatch(r"(\+?)(?:\.(\d+))?(~?)([p%gsf]?)", pattern or "")
    if not pattern or match is None or match[4] == "s":
        return tick_label(value, largest)
    sign, digits, trimmed, kind = match.groups()
    if kind in ("p", "%"):
        text = f"{100 * value:.{digits or 6}{'g' if kind == 'p' else 'f'}}"
        text = _plain_number(text)
    else:
        text = f"{value:.{digits or 6}{'f' if kind == 'f' else 'g'}}"
    if trimmed and "." in text and "e" not in text:
        text = text.rstrip("0").rstrip(".")
    text = text if not (sign and value > 0) else f"+{text}"
    return text.replace("-", MINUS) + ("%" if kind in ("p", "%") else "")


def _plain_number(text: str) -> str:
    """Without an exponent where that is short."""
    number = float(text)
    return f"{number:.0f}" if "e" in text and abs(number) >= 1 else text
