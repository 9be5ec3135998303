"""What would decide a comparison: more steps, or more seeds."""

from __future__ import annotations

import math

import scipy

from fp8scope_dashboard.analysis.losses.seeds import Spread

# More is not worth saying.
MOST_SEEDS = 64
MOST_GROWTH = 100.0


def steps_needed(delta: float, half: float, tolerance: float, points: int, gap: float) -> int | None:
    """Further steps after which an interval delta -+ half would lie on one side of the tolerance.

    The half-width shrinks with the square root of the run's length. None if it is narrow enough already, or
    if that would take more than MOST_GROWTH times the present length.
    """
    target = abs(tolerance - abs(delta))
    if half <= target or target <= 0.0:
        return None
    growth = (half / target) ** 2
    return math.ceil((growth - 1.0) * points * gap) if growth <= MOST_GROWTH else None


def seeds_needed(delta: float, spread: Spread, margin: float, alpha: float, have: int) -> int | None:
    """Seeds in each arm (more than `have`) with which a test over seeds would decide; None if too many.

    It decides if it tells a difference from the margin, or equivalence within twice the margin.
    """
    target = max(abs(margin - abs(delta)), 2.0 * margin - abs(delta))
    for count in range(max(2, have + 1), MOST_SEEDS + 1):
        freedom = max(spread.freedom, 2.0 * count - 2.0)
        if -float(scipy.special.stdtrit(freedom, alpha)) * spread.error(count, count) <= target:
            return count
    return None
