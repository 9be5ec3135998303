"""Changes of the mean of a series: change-points with confidence intervals. Pure functions.

A single change-point is the split with the smallest sum of squares around the two means, which is the maximum
of the standardised CUSUM. Its interval is the set of splits whose likelihood ratio against the best one,
n log(RSS(k) / RSS(best)), is below 7.35, the 95 % quantile of the limit distribution (Yao, Annals of
Statistics 15, 1987; Hansen, Econometrica 68, 2000). Several change-points are taken by binary segmentation
with the penalty of the Bayesian information criterion (Vostrikova 1981).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats

LIKELIHOOD_RATIO_95: Final = 7.35
# Points on each side of a change-point.
MIN_POINTS: Final = 3
MAX_BENDS: Final = 200
# A change-point costs a position and a mean: 3 log n is above BIC's 2, against changes by chance.
PENALTY: Final = 3.0


@dataclass(frozen=True)
class ChangePoint:
    """The mean changes between the points `index - 1` and `index`; `low`..`high` is its 95 % interval."""

    index: int
    low: int
    high: int
    before: float
    after: float


def change_point(values: Floats) -> ChangePoint | None:
    """The change-point of a series without NaN; None if a constant mean explains it as well.

    Args:
        values: float64[n].
    """
    n = len(values)
    if n < 2 * MIN_POINTS:
        return None
    splits = np.arange(MIN_POINTS, n - MIN_POINTS + 1)
    sums, total = np.cumsum(values)[splits - 1], float(values.sum())
    means = sums / splits, (total - sums) / (n - splits)
    centred = float(np.square(values - total / n).sum())
    # Between-group sum of squares: what the split explains.
    explained = splits * (n - splits) / n * np.square(means[0] - means[1])
    floor = 1e-12 * max(centred, float(np.square(values).max()), 1e-300)
    residual = np.maximum(centred - explained, floor)
    best = int(np.argmin(residual))
    if n * np.log(max(centred, floor) / residual[best]) <= PENALTY * np.log(n):
        return None
    inside = np.flatnonzero(n * np.log(residual / residual[best]) <= LIKELIHOOD_RATIO_95)
    return ChangePoint(
        int(splits[best]),
        int(splits[inside[0]]),
        int(splits[inside[-1]]),
        float(means[0][best]),
        float(means[1][best]),
    )


def change_points(values: Floats, most: int = 8) -> list[ChangePoint]:
    """Up to `most` change-points of float64[n] in ascending order, by binary segmentation.

    Each part between two of them is searched in turn with `change_point` (Scott & Knott 1974).
    """
    changes: list[ChangePoint] = []
    pending = [(0, len(values))]
    while pending and len(changes) < most:
        begin, end = pending.pop(0)
        change = change_point(values[begin:end])
        if change is None:
            continue
        at = begin + change.index
        changes.append(ChangePoint(at, begin + change.low, begin + change.high, change.before, change.after))
        pending += [(begin, at), (at, end)]
    return sorted(changes, key=lambda change: change.index)


def slope_change(values: Floats) -> tuple[int, int, int] | None:
    """Return where a series begins to rise: the bend of two joined lines with the smallest sum of squares.

    Args:
        values: float64[n], without NaN.

    Returns:
        The index of the bend, and the first and last index of its 95 % interval (as of a change-point); None
        if the second line does not rise more than the first, or n is less than four times MIN_POINTS.
    """
    n = len(values)
    if n < 4 * MIN_POINTS:
        return None
    bends = np.unique(np.linspace(MIN_POINTS, n - MIN_POINTS, min(n, MAX_BENDS)).astype(np.int64))
    time = np.arange(n, dtype=np.float64)
    residual, rises = np.empty(len(bends)), np.empty(len(bends))
    for i, bend in enumerate(bends.tolist()):
        lines = np.stack([np.ones(n), time, np.maximum(time - bend, 0.0)], axis=1)
        weights = np.linalg.lstsq(lines, values, rcond=None)[0]
        residual[i], rises[i] = np.square(values - lines @ weights).sum(), weights[2]
    best = int(np.argmin(residual))
    if rises[best] <= 0.0:
        return None
    floor = max(float(residual[best]), 1e-300)
    inside = bends[n * np.log(np.maximum(residual, floor) / floor) <= LIKELIHOOD_RATIO_95]
    return int(bends[best]), int(inside[0]), int(inside[-1])
