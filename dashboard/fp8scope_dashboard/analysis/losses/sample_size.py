"""The sample size that would decide a comparison: more steps, or more seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.losses.seeds import Spread
from fp8scope_dashboard.statistics.student import upper_quantile

# More is not worth saying.
MAX_SEEDS = 64
MAX_GROWTH = 100.0
# A difference moves if the means of so many blocks of its recent half have a slope, by a test at this level.
MOVING_BLOCKS, MOVING_LEVEL = 12, 0.01


@dataclass(frozen=True)
class Movement:
    """A difference that moves: by how much it has changed since a point of the axis."""

    since: float
    change: float


@dataclass(frozen=True)
class Trend:
    """A change from the first block of a series to its last, its standard error and degrees of freedom."""

    change: float
    error: float
    freedom: int


def movement(x: NDArray[np.float64], difference: NDArray[np.float64]) -> Movement | None:
    """The movement of a difference float64[n] in its recent half; None if it shows none.

    The slope of block means against their residuals: noise that is shorter than a block has none. A walk has
    one, and moves.
    """
    first = len(difference) // 2
    if len(difference) - first < 2 * MOVING_BLOCKS:
        return None
    recent = trend(difference[first:])
    if abs(recent.change) <= upper_quantile(0.5 * MOVING_LEVEL, recent.freedom) * recent.error:
        return None
    return Movement(float(x[first]), recent.change)


def trend(values: NDArray[np.float64]) -> Trend:
    """The linear trend of the means of MOVING_BLOCKS blocks of values, float64[n], n >= MOVING_BLOCKS."""
    blocks = np.array([block.mean() for block in np.array_split(values, MOVING_BLOCKS)])
    offsets = np.arange(MOVING_BLOCKS) - 0.5 * (MOVING_BLOCKS - 1)
    slope = float(offsets @ blocks / (offsets @ offsets))
    rest = blocks - blocks.mean() - slope * offsets
    freedom = MOVING_BLOCKS - 2
    error = math.sqrt(float(rest @ rest) / freedom / float(offsets @ offsets))
    return Trend(slope * (MOVING_BLOCKS - 1), error * (MOVING_BLOCKS - 1), freedom)


def steps_needed(delta: float, half: float, tolerance: float, points: int, gap: float) -> int | None:
    """Further steps after which an interval delta -+ half would lie on one side of the tolerance.

    The half-width shrinks with the square root of the run's length, if the difference does not move. None if
    it is narrow enough already, or if that would take more than MAX_GROWTH times the present length.
    """
    target = abs(tolerance - abs(delta))
    if half <= target or target <= 0.0:
        return None
    growth = (half / target) ** 2
    return math.ceil((growth - 1.0) * points * gap) if growth <= MAX_GROWTH else None


def seeds_needed(delta: float, spread: Spread, margin: float, alpha: float, have: int) -> int | None:
    """Seeds in each arm (more than `have`) with which a test over seeds would decide; None if too many.

    It decides if it tells a difference from the margin, or equivalence within twice the margin.
    """
    target = max(abs(margin - abs(delta)), 2.0 * margin - abs(delta))
    for count in range(max(2, have + 1), MAX_SEEDS + 1):
        freedom = max(spread.freedom, 2.0 * count - 2.0)
        if upper_quantile(alpha, freedom) * spread.error(count, count) <= target:
            return count
    return None
