"""Axes of a figure: their range, their ticks, and where a value is drawn."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Space beyond the data, as a fraction of their extent.
PADDING = 0.04
TICKS = 6


def numbers(values: Any) -> Floats:
    """The values of a trace, which plotly writes as a list or as base64; float64, NaN where null."""
    if isinstance(values, Mapping):
        decoded = np.frombuffer(base64.b64decode(values["bdata"]), np.dtype(str(values["dtype"])))
        if "shape" in values:
            decoded = decoded.reshape([int(size) for size in str(values["shape"]).split(",")])
        return np.asarray(decoded, np.float64)
    if values is None:
        return np.zeros(0)
    return np.array([math.nan if value is None else value for value in values], np.float64)


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        low, high: the ends of its range; of a log axis in powers of ten. `low` is drawn at `start`.
        start, end: pixels.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def at(self, values: Any) -> Floats:
        """Pixels of values, NaN where a log axis has no place for one."""
        data = np.asarray(values, np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                data = np.where(data > 0, np.log10(data), np.nan)
        share = (data - self.low) / ((self.high - self.low) or 1.0)
        return np.asarray(self.start + share * (self.end - self.start), np.float64)

    def ticks(self) -> list[tuple[float, str]]:
        """Pixels and labels of the ticks within the range."""
        if self.options.get("showticklabels") is False or self.options.get("visible") is False:
            return []
        if self.options.get("tickmode") == "array":
            values = numbers(self.options.get("tickvals"))
            labels = [str(text) for text in self.options.get("ticktext") or [f"{v:g}" for v in values]]
        else:
            values = self._values()
            labels = [label_of(value, str(self.options.get("tickformat") or "")) for value in values]
        pixels = self.at(values)
        first, last = sorted((self.start, self.end))
        return [
            (float(pixel), label)
            for pixel, label in zip(pixels, labels, strict=False)
            if first - 0.5 <= pixel <= last + 0.5
        ]

    def _values(self) -> Floats:
        low, high = sorted((self.low, self.high))
        if self.log:
            decades = np.arange(math.floor(low), math.ceil(high) + 1)
            if high - low < 1:
                return _evenly(10.0**low, 10.0**high)
            if high - low < 2:
                return np.array([m * 10.0**d for d in decades for m in (1, 2, 5)])
            stride = max(1, math.ceil((high - low) / TICKS))
            return np.asarray(10.0 ** decades[::stride].astype(np.float64))
        return _evenly(low, high)


def _evenly(low: float, high: float) -> Floats:
    step = nice_step((high - low) / TICKS)
    return np.asarray(np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step, np.float64)


def nice_step(size: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `size`."""
    if not size > 0 or not math.isfinite(size):
        return 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return next((m * power for m in (1.0, 2.0, 2.5, 5.0) if m * power >= size * 0.999), 10.0 * power)


def label_of(value: float, form: str) -> str:
    """A tick's label. `form` is plotly's format, of which the sign and the percent are heeded."""
    if abs(value) < 1e-300:
        value = 0.0
    sign = "+" if form.startswith("+") and value > 0 else ""
    if form.endswith(("%", "p")):
        text = f"{100.0 * value:.4g} %"
    elif value and not 1e-4 <= abs(value) < 1e6:
        text = f"{value:.3g}"
    else:
        text = f"{value:,.6g}"
    return sign + text.replace("-", "−")


def range_of(
    options: Mapping[str, Any], values: Sequence[Floats], *, cells: bool = False
) -> tuple[float, float]:
    """The range of an axis: its own, or that of its data. `cells`: centres of a heat map's cells."""
    own = options.get("range")
    if own is not None and len(own) == 2 and None not in own:
        return float(own[0]), float(own[1])
    log = options.get("type") == "log"
    data = np.concatenate(list(values)) if values else np.zeros(0)
    if log:
        data = np.log10(data[data > 0])
    data = data[np.isfinite(data)]
    if not len(data):
        return 0.0, 1.0
    low, high = float(data.min()), float(data.max())
    if cells:
        places = np.unique(data)
        half = float(np.median(np.diff(places))) / 2.0 if len(places) > 1 else 0.5
        low, high = low - half, high + half
    else:
        room = PADDING * ((high - low) or abs(high) or 1.0)
        to_zero = options.get("rangemode") == "tozero" and not log
        low, high = (min(0.0, low) if to_zero else low - room), high + room
    return (high, low) if options.get("autorange") == "reversed" else (low, high)
