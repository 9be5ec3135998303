"""The modes of the map of tensors: a statistic, its change, or its difference to another run. Pure functions.

A group's row is the extreme of its tensors: the largest value, and of signed values that of the largest size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.tensor_onsets import is_rate
from fp8scope_dashboard.pages.formatting import number
from fp8scope_dashboard.statistics.arrays import Floats

Mode = Literal["value", "change", "difference"]
MODES: Final = get_args(Mode)

# Levels of colour, uint8: no value, zero, and from low to high.
NO_VALUE, ZERO, LOWEST, HIGHEST = 0, 1, 2, 255
# Levels of signed values: MIDDLE is zero.
MIDDLE: Final = 128
# Of rates from one in a million to one, at every second power of ten.
RATE_MARKS: Final = ("0.0001 %", "0.01 %", "1 %", "100 %")
# The smallest and the largest ends of the scale of log2 changes.
MIN_CHANGE, MAX_CHANGE = 1.0, 16.0


@dataclass(frozen=True)
class ColourScale:
    """The mapping of values to colours.

    Attributes:
        signed: whether values have two directions; the colours of zero and of both ends differ.
        low, high: log10 of the ends for unsigned values; for signed ones, `high` is the end of log2 changes,
            or 0 for differences of rates, whose scale is logarithmic from 10^low to 1.
        marks: (level, label) of the legend.
    """

    signed: bool
    low: float
    high: float
    marks: Sequence[tuple[int, str]]


def extremes(values: Floats, groups: Sequence[Sequence[int]], *, signed: bool) -> Floats:
    """The rows of groups, float64[G, C], from those of tensors, float64[T, C]; NaN without any value."""
    rows = np.full((len(groups), values.shape[1]), np.nan)
    for i, positions in enumerate(groups):
        some = values[list(positions)]
        rows[i] = np.fmax.reduce(some, axis=0)
        if signed:
            lowest = np.fmin.reduce(some, axis=0)
            rows[i] = np.where(-lowest > rows[i], lowest, rows[i])
    return rows


def difference(values: Floats, other: Floats, statistic: str) -> Floats:
    """Values less those of another run: the difference of rates, log2 of the ratio of other statistics."""
    if is_rate(statistic):
        return values - other
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(values) - np.log2(other)
    return np.where(np.isfinite(ratio), ratio, np.nan)


def aligned(edges: NDArray[np.int64], other_edges: NDArray[np.int64], other: Floats) -> Floats:
    """The columns of another run, float64[T, D], over the columns of this one, float64[T, C].

    A column has the largest value of the other run's columns that share a step with it; NaN without any.
    """
    columns = np.full((len(other), len(edges) - 1), np.nan)
    if not other.shape[1]:
        return columns
    first = np.searchsorted(other_edges, edges[:-1], side="right") - 1
    last = np.searchsorted(other_edges, edges[1:], side="left")
    for c, (low, high) in enumerate(zip(np.maximum(first, 0), np.minimum(last, other.shape[1]), strict=True)):
        if high > low:
            columns[:, c] = np.fmax.reduce(other[:, low:high], axis=1)
    return columns


def scale_of_values(values: Floats, statistic: str) -> ColourScale:
    """The scale of a statistic: fixed for rates, so that runs compare; else from its values."""
    if is_rate(statistic):
        return _unsigned(-6.0, 0.0, ("0", *RATE_MARKS))
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = decades_of(positive)
    ends = [number(float(f"{10.0**power:.2g}"), 2) for power in np.linspace(low, high, 4)]
    return _unsigned(low, high, ("0", *ends))


def scale_of_changes(values: Floats) -> ColourScale:
    """The scale of log2 changes, symmetric around no change."""
    size = np.abs(values[np.isfinite(values)])
    reach = float(np.quantile(size, 0.995)) if len(size) else MIN_CHANGE
    high = float(np.clip(np.ceil(reach), MIN_CHANGE, MAX_CHANGE))
    labels = (f"÷ {2**high:.0f}", "=", f"× {2**high:.0f}")
    return ColourScale(True, -high, high, tuple(zip((1, MIDDLE, HIGHEST), labels, strict=True)))


def scale_of_differences(values: Floats, statistic: str) -> ColourScale:
    """The scale of differences to another run."""
    if not is_rate(statistic):
        return scale_of_changes(values)
    labels = ("−100 %", "−0.1 %", "0", "+0.1 %", "+100 %")
    return ColourScale(True, -6.0, 0.0, tuple(zip((1, 65, MIDDLE, 192, HIGHEST), labels, strict=True)))


def levels(values: Floats, scale: ColourScale) -> NDArray[np.uint8]:
    """The level of colour of each value, uint8 of the same shape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if scale.signed:
            if scale.high > 0:
                share = np.clip(values / scale.high, -1.0, 1.0)
            else:
                size = np.log10(np.abs(values))
                share = np.sign(values) * np.clip(1.0 - size / scale.low, 0.0, 1.0)
            level = MIDDLE + np.rint(np.where(values == 0, 0.0, share) * (HIGHEST - MIDDLE))
        else:
            share = np.clip((np.log10(values) - scale.low) / (scale.high - scale.low), 0.0, 1.0)
            level = np.where(values == 0, ZERO, LOWEST + np.rint(share * (HIGHEST - LOWEST)))
    return np.where(np.isnan(values), NO_VALUE, np.nan_to_num(level, nan=LOWEST)).astype(np.uint8)


def _unsigned(low: float, high: float, labels: Sequence[str]) -> ColourScale:
    positions = [ZERO, *(int(level) for level in np.linspace(LOWEST, HIGHEST, len(labels) - 1))]
    return ColourScale(False, low, high, tuple(zip(positions, labels, strict=True)))


def decades_of(positive: Floats) -> tuple[float, float]:
    """log10 of the ends of positive values, float64[N], without the outermost 0.5 % on either side."""
    if not len(positive):
        return 0.0, 1.0
    low, high = (float(end) for end in np.log10(np.quantile(positive, [0.005, 0.995])))
    return (low, high) if high - low > 0.3 else (low - 0.15, low + 0.3)
