"""Confidence intervals of scores, over the items of one run and over runs that differ in their seed.

Every function returns an `Interval` at level 1 - alpha, two-sided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A standard error needs at least so many independent units.
UNITS = 2
# The power to which the smallest detectable difference refers.
POWER = 0.8


class Interval(NamedTuple):
    """Lower and upper bound."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value is in the interval, bounds included."""
        return self.low <= value <= self.high


def wilson(successes: int, n: int, alpha: float) -> Interval:
    """Score interval of a proportion (Wilson, 1927): good coverage on average, at any n.

    Raises:
        ValueError: if n < 1, or successes is outside 0..n.
    """
    _check_count(successes, n)
    z = float(scipy.stats.norm.isf(alpha / 2.0))
    share, weight = successes / n, z * z / n
    centre = (share + weight / 2.0) / (1.0 + weight)
    half = z / (1.0 + weight) * math.sqrt(share * (1.0 - share) / n + weight / (4.0 * n))
    # Exact at the ends: rounding must not move a bound outside of [0, 1].
    low = 0.0 if successes == 0 else max(centre - half, 0.0)
    high = 1.0 if successes == n else min(centre + half, 1.0)
    return Interval(low, high)


def clopper_pearson(successes: int, n: int, alpha: float) -> Interval:
    """Exact interval of a proportion (Clopper and Pearson, 1934): coverage is never below 1 - alpha.

    Raises:
        ValueError: if n < 1, or successes is outside 0..n.
    """
    _check_count(successes, n)
    low = 0.0 if successes == 0 else float(scipy.stats.beta.ppf(alpha / 2.0, successes, n - successes + 1))
    high = 1.0 if successes == n else float(scipy.stats.beta.isf(alpha / 2.0, successes + 1, n - successes))
    return Interval(low, high)


def standard_error(items: Floats, clusters: Sequence[str] | None = None) -> float:
    """Standard error of the mean of float64[n] items; clustered if cluster names are given.

    Clustered: sqrt(G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2) / n over G clusters (Liang and Zeger, 1986,
    with the G/(G-1) correction). For clusters of one item this is s / sqrt(n).

    Raises:
        ValueError: if there are fewer than two items or clusters, or not one cluster name per item.
    """
    sums = _cluster_sums(items - items.mean(), clusters)
    units = len(sums)
    if units < UNITS:
        raise ValueError("A standard error needs at least two independent items or clusters.")
    return math.sqrt(units / (units - 1.0) * float(sums @ sums)) / len(items)


def mean_interval(items: Floats, alpha: float, clusters: Sequence[str] | None = None) -> Interval:
    """Interval of a mean: central limit theorem; with G clusters, Student-t with G - 1 degrees of freedom."""
    error = standard_error(items, clusters)
    freedom = math.inf if clusters is None else len(set(clusters)) - 1
    return around(float(items.mean()), quantile(alpha, freedom) * error)


def student_t(scores: Floats, alpha: float) -> Interval:
    """Interval of the mean over the scores of K seeds, float64[K], K >= 2."""
    if len(scores) < UNITS:
        raise ValueError("An interval over seeds needs at least two of them.")
    error = float(np.std(scores, ddof=1)) / math.sqrt(len(scores))
    return around(float(scores.mean()), quantile(alpha, len(scores) - 1) * error)


def prediction(scores: Floats, alpha: float, further: int = 1) -> Interval:
    """Prediction interval of the mean of `further` new seeds, from the scores of K seeds, float64[K], K >= 2.

    mean +- t_{K-1} s sqrt(1/further + 1/K). Compare a new run with this interval: that of `student_t` is for
    the mean of all seeds, and a further run of the same configuration falls outside far too often.
    """
    if len(scores) < UNITS:
        raise ValueError("An interval over seeds needs at least two of them.")
    error = float(np.std(scores, ddof=1)) * math.sqrt(1.0 / further + 1.0 / len(scores))
    return around(float(scores.mean()), quantile(alpha, len(scores) - 1) * error)


def smallest_detectable(error: float, alpha: float, degrees_of_freedom: float = math.inf) -> float:
    """The true difference that a two-sided test of size alpha finds with probability POWER.

    `error` is the standard error of the difference. For the normal distribution the result is
    (z_{1 - alpha/2} + z_POWER) error. For Student-t it is the non-centrality at which the non-central t
    exceeds the critical value with probability POWER, times error.
    """
    critical = quantile(alpha, degrees_of_freedom)
    if math.isinf(degrees_of_freedom):
        return (critical + float(scipy.stats.norm.ppf(POWER))) * error

    def missing_power(shift: float) -> float:
        return float(scipy.stats.nct.sf(critical, degrees_of_freedom, shift)) - POWER

    return float(scipy.optimize.brentq(missing_power, 0.0, 10.0 * critical)) * error


def quantile(alpha: float, degrees_of_freedom: float = math.inf) -> float:
    """Upper alpha/2 quantile of Student-t; of the normal distribution for infinite degrees of freedom."""
    if math.isinf(degrees_of_freedom):
        return float(scipy.stats.norm.isf(alpha / 2.0))
    return float(scipy.stats.t.isf(alpha / 2.0, degrees_of_freedom))


def two_sided(difference: float, error: float, degrees_of_freedom: float = math.inf) -> float:
    """Two-sided p-value of a difference with this standard error."""
    if error == 0.0:
        return 1.0 if difference == 0.0 else 0.0
    ratio = abs(difference) / error
    if math.isinf(degrees_of_freedom):
        return 2.0 * float(scipy.stats.norm.sf(ratio))
    return 2.0 * float(scipy.stats.t.sf(ratio, degrees_of_freedom))


def around(centre: float, half: float) -> Interval:
    """centre +- half."""
    return Interval(centre - half, centre + half)


def _cluster_sums(deviations: Floats, clusters: Sequence[str] | None) -> Floats:
    if clusters is None:
        return deviations
    if len(clusters) != len(deviations):
        raise ValueError(
            f"{len(deviations)} items but {len(clusters)} cluster names: give one name per item."
        )
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    return np.bincount(index, weights=deviations).astype(np.float64)


def _check_count(successes: int, n: int) -> None:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: need n >= 1 and 0 <= successes <= n.")
