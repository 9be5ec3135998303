"""Bring the last part of several curves to common bins. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats

MAX_BINS: Final = 48
MIN_BINS: Final = 12
# With fewer, the window grows: the correlation of few values is hard to estimate.
ENOUGH_BINS: Final = 24


@dataclass(frozen=True)
class BinnedCurves:
    """Curves in common bins.

    Attributes:
        x: float64[B], increasing: the mean position of the points in each bin.
        values: float64[R, B], the mean of each curve in each bin.
        low, high: the first and the last position of the window.
    """

    x: Floats
    values: Floats
    low: float
    high: float

    def __len__(self) -> int:
        return len(self.x)


def last_window(
    curves: Sequence[tuple[Floats, Floats]], share: float, *, widest: float | None = None
) -> BinnedCurves | None:
    """The curves over the last `share` of their common range, in at most MAX_BINS bins.

    Bins hold (nearly) equally many points of the curve with the fewest points there. If it has fewer than
    ENOUGH_BINS in the window, the window grows, up to the share `widest`. None if there are fewer than
    MIN_BINS then, or if some curve has no point in more than a quarter of the bins.

    Args:
        curves: of each run, positions float64[N], increasing, and values float64[N].
    """
    if not curves or any(len(x) == 0 for x, _ in curves):
        return None
    begin, high = max(float(x[0]) for x, _ in curves), min(float(x[-1]) for x, _ in curves)
    inside: list[tuple[Floats, Floats]] = []
    low = high
    for part in np.linspace(share, widest or share, 8):
        low = max(begin, high * (1.0 - float(part)))
        inside = [
            (x[first:last], values[first:last])
            for x, values in curves
            for first, last in [np.searchsorted(x, [low, np.nextafter(high, np.inf)])]
        ]
        if min(len(x) for x, _ in inside) >= ENOUGH_BINS:
            break
    return _binned(inside, low, high) if min(len(x) for x, _ in inside) >= MIN_BINS else None


def _binned(curves: Sequence[tuple[Floats, Floats]], low: float, high: float) -> BinnedCurves | None:
    fewest = min((x for x, _ in curves), key=len)
    count = min(MAX_BINS, len(fewest))
    firsts = np.linspace(0, len(fewest), count + 1).astype(np.int64)[1:-1]
    edges = (fewest[firsts - 1] + fewest[firsts]) / 2.0
    positions, values = [], []
    for x, y in curves:
        bins = np.searchsorted(edges, x, side="left")
        sizes = np.bincount(bins, minlength=count)
        with np.errstate(invalid="ignore", divide="ignore"):
            positions.append(np.bincount(bins, weights=x, minlength=count) / sizes)
            values.append(np.bincount(bins, weights=y, minlength=count) / sizes)
    stacked = np.stack(values)
    filled = np.isfinite(np.stack(positions)).all(axis=0)
    if filled.mean() < 0.75 or filled.sum() < MIN_BINS:
        return None
    return BinnedCurves(np.stack(positions).mean(axis=0)[filled], stacked[:, filled], low, high)
