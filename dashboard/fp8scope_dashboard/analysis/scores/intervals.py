"""Confidence intervals of scores, over the items of one run and over runs that differ in their seed.

Every function returns an `Interval` at level 1 - alpha, two-sided. `limits` clip it to the metric's range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.scores import skewness
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.student import upper_quantile

# A standard error needs at least so many independent units.
UNITS = 2
# The power to which the smallest detectable difference refers.
POWER = 0.8
# Spreads below this share of the value are rounding errors of equal numbers.
ROUNDING: Final = 1e-9


class Interval(NamedTuple):
    """Lower and upper bound."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether a value is in the interval, bounds included."""
        return self.low <= value <= self.high

    def clipped(self, limits: Interval) -> Interval:
        """The part within the limits."""
        low, high = max(self.low, limits.low), min(self.high, limits.high)
        return Interval(min(low, limits.high), max(high, limits.low))


UNLIMITED: Final = Interval(-math.inf, math.inf)


@dataclass(frozen=True)
class Error:
    """Standard error of a mean.

    Attributes:
        freedom: degrees of freedom of Student's t.
        units: independent items or clusters.
        skewness: of the mean; 0 if it may be chance.
        largest_cluster: share of the items in the largest cluster; 0 without clusters.
    """

    value: float
    freedom: float
    units: int
    skewness: float = 0.0
    largest_cluster: float = 0.0

    @property
    def doubt(self) -> str:
        """Return why no interval of the mean is reliable; empty if one is."""
        return skewness.doubt(self.skewness, self.largest_cluster, self.units)


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


def unseen(units: int, alpha: float) -> float:
    """Largest probability of an event that n units did not show: 1 - alpha^(1/n), one-sided.

    The exact form of the rule of three (Hanley and Lippman-Hand, 1983): about 3/n at alpha = 0.05.
    """
    return -math.expm1(math.log(alpha) / units)


def error_of_mean(items: Floats, clusters: Sequence[str] | None = None) -> Error:
    """Standard error of the mean of float64[n] items, with its degrees of freedom.

    Without clusters s / sqrt(n), with n - 1 degrees. With clusters CR2 (Bell and McCaffrey, 2002): the
    cluster sums S_g of the residuals are scaled by 1 / sqrt(1 - n_g / n), which removes the bias of few
    clusters, and the degrees of freedom are Satterthwaite's: the smaller of those for independent items and
    for equal items within a cluster. G clusters of equal size have G - 1.

    Raises:
        ValueError: if there are fewer than two items or clusters, or not a cluster name per item.
    """
    if clusters is None:
        if len(items) < UNITS:
            raise ValueError("A standard error needs at least two independent items or clusters.")
        spread = _spread(items)
        lean = skewness.of_mean(items - items.mean()) if spread > 0.0 else 0.0
        return Error(spread / math.sqrt(len(items)), len(items) - 1, len(items), lean)
    index, sizes = cluster_index(clusters, len(items))
    if len(sizes) < UNITS:
        raise ValueError("A standard error needs at least two independent items or clusters.")
    sums = np.bincount(index, weights=items - items.mean())
    shares = sizes / len(items)
    variance = float(np.sum(sums**2 / (1.0 - shares))) / len(items) ** 2
    if math.sqrt(variance) <= ROUNDING * float(np.abs(items).max()):
        variance = 0.0
    freedom = min(_satterthwaite(shares, working) for working in (sizes, sizes**2))
    lean = skewness.of_mean(sums.astype(np.float64)) if variance > 0.0 else 0.0
    return Error(math.sqrt(variance), freedom, len(sizes), lean, float(shares.max()))


def _satterthwaite(shares: Floats, working: Floats) -> float:
    """(tr W)^2 / tr W^2 of the CR2 variance, where `working` are the variances of the cluster sums."""
    # W is the covariance of the scaled residual sums (T_g - p_g sum T) sqrt(d_g), with p the shares and
    # d = 1 / (1 - p). Its off-diagonal part is of rank two, so that both traces are sums over clusters.
    d = 1.0 / (1.0 - shares)
    total = float(working.sum())
    a, b, c = (float(np.sum(d * x * y)) for x, y in ((shares, shares), (working, working), (shares, working)))
    trace = float(np.sum(d * working)) - 2.0 * c + total * a
    crossed = 2.0 * a * b + (total * a) ** 2 + 2.0 * c * c - 4.0 * total * a * c
    own = working * (working - 4.0 * shares * working + 2.0 * total * shares**2)
    return trace**2 / (crossed + float(np.sum(d * d * own)))


def cluster_index(clusters: Sequence[str], n: int) -> tuple[NDArray[np.int64], Floats]:
    """The cluster of each of n items as a number, int64[n], and the sizes of the clusters, float64[m].

    Raises ValueError if there is not one name for each item.
    """
    if len(clusters) != n:
        raise ValueError(f"{n} items but {len(clusters)} cluster names: give one name per item.")
    _, index, sizes = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    return index.astype(np.int64), sizes.astype(np.float64)


def mean_interval(
    items: Floats, alpha: float, clusters: Sequence[str] | None = None, limits: Interval = UNLIMITED
) -> Interval:
    """Student-t interval of the mean of float64[n] items, with clusters by `error_of_mean`.

    Equal items (or cluster means) show no spread. Their interval allows for values that the n units did not
    show: the mean may differ by the range of the items, or of the limits, times `unseen(n, alpha / 2)`.
    Skewed items are corrected for; without a reliable interval (`Error.doubt`) it is that of all values.
    """
    error = error_of_mean(items, clusters)
    mean = float(items.mean())
    if error.doubt:
        return UNLIMITED.clipped(limits)
    if error.value == 0.0:
        width = limits.high - limits.low if math.isfinite(limits.high - limits.low) else float(np.ptp(items))
        half = width * unseen(error.units, alpha / 2.0)
        return around(mean, half).clipped(limits)
    critical = quantile(alpha, error.freedom)
    low, high = (
        mean - error.value * skewness.restored(side * critical, error.skewness) for side in (1.0, -1.0)
    )
    return Interval(low, high).clipped(limits)


def student_t(scores: Floats, alpha: float, limits: Interval = UNLIMITED) -> Interval:
    """Interval of the mean over the scores of K seeds, float64[K]. Raises ValueError if K < 2."""
    if len(scores) < UNITS:
        raise ValueError("An interval over seeds needs at least two of them.")
    error = _spread(scores) / math.sqrt(len(scores))
    return around(float(scores.mean()), quantile(alpha, len(scores) - 1) * error).clipped(limits)


def prediction(scores: Floats, alpha: float, further: int = 1, limits: Interval = UNLIMITED) -> Interval:
    """Prediction interval of the mean of `further` new seeds, from the scores of K seeds, float64[K].

    mean +- t_{K-1} s sqrt(1/further + 1/K). Compare a new run with this interval: that of `student_t` is for
    the mean of all seeds, and a further run of the same configuration falls outside far too often. Raises
    ValueError if K < 2.
    """
    if len(scores) < UNITS:
        raise ValueError("An interval over seeds needs at least two of them.")
    error = _spread(scores) * math.sqrt(1.0 / further + 1.0 / len(scores))
    return around(float(scores.mean()), quantile(alpha, len(scores) - 1) * error).clipped(limits)


def has_spread(scores: Floats) -> bool:
    """Return whether scores, float64[n], differ by more than the rounding of equal numbers."""
    return _spread(scores) > 0.0


# Of Student's t, for which the non-central t is computed; beyond it the limit is as good to 0.1 %.
MAX_CRITICAL = 1e3


def smallest_detectable(
    error: float, alpha: float, freedom: float = math.inf, *, one_sided: bool = False
) -> float:
    """The true difference that a test of size alpha finds with probability POWER.

    `error` is the standard error of the difference. For the normal distribution the result is
    (z_{1 - alpha/2} + z_POWER) error, with z_{1 - alpha} if one-sided. For Student-t it is the
    non-centrality at which the non-central t exceeds the critical value with probability POWER, times error.
    """
    critical = quantile(2.0 * alpha if one_sided else alpha, freedom)
    # The quantiles agree to 1e-4 there, and the non-central t overflows for larger values.
    if freedom > 1e4:
        return (critical + float(scipy.stats.norm.ppf(POWER))) * error

    # The noise of the difference no longer matters, only that of its standard error; the non-central t fails.
    if critical > MAX_CRITICAL:
        return critical * math.sqrt(float(scipy.stats.chi2.ppf(POWER, freedom)) / freedom) * error

    def missing_power(shift: float) -> float:
        return float(scipy.stats.nct.sf(critical, freedom, shift)) - POWER

    return float(scipy.optimize.brentq(missing_power, 0.0, 10.0 * critical + 10.0)) * error


def quantile(alpha: float, freedom: float = math.inf) -> float:
    """Upper alpha/2 quantile of Student-t; of the normal distribution for infinite degrees of freedom."""
    return upper_quantile(alpha / 2.0, freedom)


def around(centre: float, half: float) -> Interval:
    """centre +- half."""
    return Interval(centre - half, centre + half)


def _spread(values: Floats) -> float:
    """Standard deviation (n - 1); 0 if it is only the rounding of equal values."""
    spread = float(np.std(values, ddof=1))
    return 0.0 if spread <= ROUNDING * float(np.abs(values).max()) else spread


def _check_count(successes: int, n: int) -> None:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: need n >= 1 and 0 <= successes <= n.")
