"""Intervals of skewed means, and means that no interval covers.

Student's t takes the mean of the items for normal. Items with a heavy tail on one side make it skewed: an
interval of 95 % then covers 45 to 90 %. Hall's transformation (Hall, 1992, 'On the removal of skewness by
transformation', JRSS B 54) corrects it to the second order. Where the tail has so much weight that the
largest items decide the mean, nothing that the items show gives an interval, and the comparison says so.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats

# The skewness of the mean, that of the items over sqrt(n). Beyond it, intervals of 95 % cover less than 90 %
# for some lognormal and Pareto items (`benchmarks/scores.py --coverage`).
# The mean of more units is less skewed unless their tail has no variance, so that the limit falls slowly from
# UNITS_OF_LIMIT units on, by their power FALL.
MAX_SKEWNESS: Final = 0.25
UNITS_OF_LIMIT: Final = 50
FALL: Final = 0.1
# A skewness within so many standard errors of 0, each sqrt(6) / n for normal items, is chance. With 2.5, the
# intervals of 20 Pareto items cover 89 %, because most samples do not show their tail. With 2.35 they cover
# 91 %, and of 20 normal items 1.1 % are refused.
MIN_DEVIATIONS: Final = 2.35
# With a larger cluster the spread between clusters is not seen: the other ones are too small to show it.
MAX_CLUSTER_SHARE: Final = 0.8


def of_mean(residuals: Floats) -> float:
    """Skewness of the mean of n independent units with these residuals, float64[n]; 0 if it may be chance."""
    # Over the largest: squares and cubes of huge residuals would overflow.
    largest = float(np.abs(residuals).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    scaled = residuals / largest
    skewness = float(np.sum(scaled**3)) / float(np.sum(scaled**2)) ** 1.5
    return skewness if abs(skewness) > MIN_DEVIATIONS * math.sqrt(6.0) / len(residuals) else 0.0


def transformed(ratio: float, skewness: float) -> float:
    """Hall's g: makes (mean - true mean) / standard error symmetric. Monotone in `ratio`."""
    k = skewness
    return ratio + k * ratio**2 / 3.0 + k**2 * ratio**3 / 27.0 + k / 6.0


def restored(quantile: float, skewness: float) -> float:
    """The inverse of `transformed`."""
    if abs(skewness) < 1e-9:
        return quantile
    return 3.0 / skewness * (float(np.cbrt(1.0 + skewness * (quantile - skewness / 6.0))) - 1.0)


def limit(units: int) -> float:
    """The largest skewness of the mean of so many units that has a reliable interval."""
    return MAX_SKEWNESS * min(1.0, math.pow(UNITS_OF_LIMIT / units, FALL))


def doubt(skewness: float, largest_cluster: float, units: int) -> str:
    """Return why no interval of a mean is reliable, as a part of a sentence; empty if one is.

    Args:
        skewness: of the mean.
        largest_cluster: share of the items in the largest cluster; 0 without clusters.
        units: independent items or clusters.
    """
    if largest_cluster > MAX_CLUSTER_SHARE:
        return (
            f"one cluster holds {100.0 * largest_cluster:.3g} % of the items, so that the spread between "
            "clusters is not known"
        )
    if abs(skewness) > limit(units):
        side = "upper" if skewness > 0 else "lower"
        return (
            f"a few items with values far on the {side} side decide the mean, and an interval from so few "
            "would be too narrow"
        )
    return ""
