"""Differences between the scores of two arms over the same items, or over different items.

An arm is float64[K, n]: K runs that differ in their seed, over n items. The difference of an item is that of
the arms' means over their runs. Further variance, of the seeds, may be added to that over items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from fp8scope_dashboard.analysis.scores import skewness
from fp8scope_dashboard.analysis.scores.intervals import (
    UNLIMITED,
    Interval,
    around,
    clopper_pearson,
    error_of_mean,
    unseen,
)
from fp8scope_dashboard.analysis.scores.reference import ReferenceDistribution
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.variances import freedom_of_sum, summed

# With so few differing items, all 2^m assignments of signs are counted.
FEW = 16


@dataclass(frozen=True)
class Discordant:
    """Items that exactly one of two runs has right, of n."""

    only_run: int
    only_baseline: int
    n: int


@dataclass(frozen=True, kw_only=True)
class ScoreDifference:
    """Score of the run minus score of the baseline, over items.

    Attributes:
        variance: of the mean difference, over items.
        freedom: degrees of freedom of `variance`.
        units: independent items or clusters.
        span: the largest change of an item; bounds what `units` equal items did not show.
        discordant: for 0/1 items of two single runs without clusters.
        nonzero: the differences of items, if they are few and exactly exchangeable; else None.
        further: variance of the seeds, which is added to `variance`.
        further_noise: square of that variance over its degrees of freedom; its part of Satterthwaite's rule.
        borrowed: the variance of the seeds is that of other runs; see `ReferenceDistribution`.
        skewness: of the mean difference over items; 0 if it may be chance.
        largest_cluster: share of the items in the largest cluster; 0 without clusters.
        identical: every run has the same score on each item.
    """

    method: str
    mean: float
    variance: float
    freedom: float
    units: int
    span: float
    discordant: Discordant | None = None
    nonzero: Floats | None = None
    further: float = 0.0
    further_noise: float = 0.0
    borrowed: bool = False
    skewness: float = 0.0
    largest_cluster: float = 0.0
    identical: bool = False

    def with_further(self, variance: float, noise: float, *, borrowed: bool = False) -> ScoreDifference:
        """The difference with the variance of seeds added."""
        return replace(self, further=variance, further_noise=noise, borrowed=borrowed)

    @property
    def error(self) -> float:
        """Standard error, seeds included. Equal items have the error of an event seen once in n + 1."""
        items = self.variance if self.variance > 0.0 else (self.span / (self.units + 1.0)) ** 2
        return math.sqrt(items + self.further)

    @property
    def total_freedom(self) -> float:
        """Satterthwaite's degrees of freedom of the two variances."""
        squares = self.variance**2 / self.freedom + self.further_noise
        return freedom_of_sum(self.variance + self.further, squares, self.freedom)

    @property
    def total_skewness(self) -> float:
        """Skewness of the difference, with that of the seeds 0."""
        total = self.variance + self.further
        return self.skewness * (self.variance / total) ** 1.5 if total > 0.0 else 0.0

    @property
    def doubt(self) -> str:
        """Return why no interval is reliable, as a part of a sentence; empty if one is."""
        return skewness.doubt(self.total_skewness, self.largest_cluster, self.units)

    @property
    def reference(self) -> ReferenceDistribution:
        """The distribution of the difference over its standard error."""
        if self.discordant is not None and self.further == 0.0:
            return ReferenceDistribution()
        return ReferenceDistribution(self.total_freedom, self.borrowed)

    def interval(self, alpha: float) -> Interval:
        """Two-sided interval at level 1 - alpha; without bounds where none is reliable (`doubt`).

        It excludes 0 just where the one-sided p-value of that side is at most alpha / 2.
        """
        return Interval(self._bounds(alpha / 2.0).low, self._bounds(alpha / 2.0).high)

    def bounds(self, low: float, high: float) -> Interval:
        """The interval with the one-sided levels `low` and `high` of its bounds."""
        return Interval(self._bounds(low).low, self._bounds(high).high)

    def p_below(self) -> float:
        """One-sided p-value of 'the true difference is 0 or more'; small if the run scores less."""
        return self._p_of(-1.0)

    def p_above(self) -> float:
        """One-sided p-value of 'the true difference is 0 or less'."""
        return self._p_of(1.0)

    def _bounds(self, level: float) -> Interval:
        """Two bounds of this one-sided level each."""
        if self.doubt:
            return UNLIMITED
        low, high = self._of_items(level)
        # The tests of few differing items are more exact than these bounds: 0 is excluded only if both do.
        if low > 0.0 and self.p_above() > level:
            low = 0.0
        if high < 0.0 and self.p_below() > level:
            high = 0.0
        return Interval(low, high)

    def _of_items(self, level: float) -> Interval:
        critical = self.reference.quantile(level)
        if self.discordant is not None:
            return _score_interval(self.discordant, critical, self.further, 2.0 * level)
        if self.variance == 0.0:
            half = math.hypot(self.span * unseen(self.units, level), critical * math.sqrt(self.further))
            return around(self.mean, half)
        error, skew = math.sqrt(self.variance + self.further), self.total_skewness
        low, high = (self.mean - error * skewness.restored(side * critical, skew) for side in (1.0, -1.0))
        return Interval(low, high)

    def _p_of(self, side: float) -> float:
        """The smallest one-sided level at which the bound on this side excludes 0."""
        if self.doubt or side * self.mean <= 0.0 and self.variance == 0.0:
            return 1.0
        if self.discordant is not None:
            # The variance under the hypothesis of no difference, as in McNemar's test.
            differing = self.discordant.only_run + self.discordant.only_baseline
            error = math.sqrt(differing / self.discordant.n**2 + self.further)
            return max(mid_p(self.discordant, side), self.reference.above(side * self.mean / error))
        if self.variance == 0.0:
            return self._p_of_equal()
        error = math.sqrt(self.variance + self.further)
        ratio = skewness.transformed(self.mean / error, self.total_skewness)
        p = self.reference.above(side * ratio)
        return p if self.nonzero is None else max(p, sign_flip(side * self.nonzero))

    def _p_of_equal(self) -> float:
        """The level at which the interval of equal differences just reaches 0."""

        def reach(log_level: float) -> float:
            critical = self.reference.quantile(math.exp(log_level))
            half = math.hypot(
                self.span * unseen(self.units, math.exp(log_level)), critical * math.sqrt(self.further)
            )
            return half - abs(self.mean)

        # A level of one half has no room on either side.
        least, most = math.log(1e-300), math.log(0.5)
        if reach(most) >= 0.0:
            return 0.5
        return 1e-300 if reach(least) <= 0.0 else math.exp(scipy.optimize.brentq(reach, least, most))


def mid_p(discordant: Discordant, side: float) -> float:
    """One-sided mid-p value of McNemar's test (Lancaster, 1961; Fagerland, Lydersen and Laake, 2013).

    Without a difference, discordant items are tosses of a fair coin. The mid-p value counts the observed
    outcome half; its size is close to nominal, where the exact test's is far below.
    """
    wins = discordant.only_run if side > 0 else discordant.only_baseline
    n = discordant.only_run + discordant.only_baseline
    if n == 0:
        return 1.0
    tail = float(scipy.stats.binom.sf(wins, n, 0.5)) + 0.5 * float(scipy.stats.binom.pmf(wins, n, 0.5))
    return min(1.0, tail)


def sign_flip(nonzero: Floats) -> float:
    """One-sided mid-p value that the sum of float64[m], m <= FEW, is so large by chance (Fisher, 1935).

    Without a difference between the arms, each difference is as likely to have the other sign.
    """
    sums = np.zeros(1)
    for size in np.abs(nonzero):
        sums = np.concatenate([sums + size, sums - size])
    observed = float(nonzero.sum())
    slack = 1e-9 * float(np.abs(nonzero).sum())
    above = float(np.mean(sums > observed + slack))
    return above + 0.5 * float(np.mean(np.abs(sums - observed) <= slack))


def paired(
    run: Floats, baseline: Floats, *, clusters: Sequence[str] | None = None, proportion: bool = False
) -> ScoreDifference:
    """Difference of two arms, float64[K, n] each, over the same n items.

    The difficulty of each item cancels. The variance is that of the differences per item; with clusters it is
    clustered (see `error_of_mean`).
    """
    differences = run.mean(axis=0) - baseline.mean(axis=0)
    error = error_of_mean(differences, clusters)
    nonzero = differences[np.abs(differences) > 1e-12]
    result = ScoreDifference(
        method="paired differences" if clusters is None else "paired differences, clustered",
        mean=float(differences.mean()),
        variance=error.value**2,
        freedom=error.freedom,
        units=error.units,
        span=1.0 if proportion else float(max(np.ptp(run), np.ptp(baseline), np.abs(differences).max())),
        skewness=_skewness(
            error.skewness, error.units, proportion=proportion, clustered=clusters is not None
        ),
        largest_cluster=error.largest_cluster,
        identical=bool((run == run[:1]).all() and (baseline == run[:1]).all()),
    )
    if not proportion or clusters is not None:
        return result
    if len(run) == len(baseline) == 1:
        counts = Discordant(int(np.sum(differences > 0.5)), int(np.sum(differences < -0.5)), run.shape[1])
        return replace(result, method="paired, McNemar", discordant=counts)
    # Two further items, of which each arm has one right and the other wrong (Bonett and Price, 2012), widen
    # the interval where few items differ.
    n = len(differences)
    sum_of_squares = float(np.sum((differences - differences.mean()) ** 2))
    widened = (sum_of_squares + 2.0 / max(len(run), len(baseline))) / (n * (n + 2.0))
    return replace(
        result,
        variance=widened,
        nonzero=nonzero if 0 < len(nonzero) <= FEW else None,
    )


def _skewness(skew: float, units: int, *, proportion: bool, clustered: bool) -> float:
    """The skewness to correct for. Differences of 0/1 items are bounded: a few of them are no heavy tail."""
    if not proportion:
        return skew
    if not clustered:
        return 0.0
    most = skewness.limit(units)
    return max(-most, min(most, skew))


def unpaired(
    run: Floats,
    baseline: Floats,
    *,
    clusters: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    proportion: bool = False,
) -> ScoreDifference:
    """Difference of two arms over different items, float64[K, n] and float64[K', n'].

    Sum of the two variances, with Welch's degrees of freedom. For 0/1 items, a right and a wrong item are
    added to each arm (Agresti and Caffo, 2000), so that the interval is not of zero width.
    """
    means = [side.mean(axis=0) for side in (run, baseline)]
    padded = [
        np.concatenate([mean, [0.0, 1.0]]) if proportion and names is None else mean
        for mean, names in zip(means, clusters, strict=True)
    ]
    errors = [error_of_mean(mean, names) for mean, names in zip(padded, clusters, strict=True)]
    variance, freedom = summed([(error.value**2, error.freedom) for error in errors])
    third = errors[0].skewness * errors[0].value ** 3 - errors[1].skewness * errors[1].value ** 3
    difference = float(means[0].mean() - means[1].mean())
    skew = third / variance**1.5 if variance > 0.0 else 0.0
    clustered = any(names is not None for names in clusters)
    return ScoreDifference(
        method="difference of means, other items",
        mean=difference,
        variance=variance,
        freedom=freedom if variance > 0.0 else min(error.freedom for error in errors),
        units=min(error.units for error in errors),
        span=1.0 if proportion else float(max(np.ptp(run), np.ptp(baseline), abs(difference))),
        skewness=_skewness(
            skew, min(error.units for error in errors), proportion=proportion, clustered=clustered
        ),
        largest_cluster=max(error.largest_cluster for error in errors),
    )


def _score_interval(counts: Discordant, critical: float, further: float, alpha: float) -> Interval:
    """Score interval of a paired difference of proportions (Tango, 1998), with further variance.

    The bounds are the differences delta with |b - c - n delta| = critical sqrt(n (2 q + delta (1 - delta)) +
    n^2 further), where q is the restricted maximum-likelihood estimate of the share of items that only the
    baseline has right. Where all changes went one way, the bound on the other side is at least that of the
    exact binomial interval, because the score interval is narrow there.
    """
    b, c, n = counts.only_run, counts.only_baseline, counts.n
    high = _score_bound(b, c, n, critical, further)
    low = -_score_bound(c, b, n, critical, further)
    if b == 0:
        low = min(low, -clopper_pearson(c, n, alpha).high)
    if c == 0:
        high = max(high, clopper_pearson(b, n, alpha).high)
    return Interval(low, high)


def _score_bound(b: int, c: int, n: int, critical: float, further: float) -> float:
    """The upper bound of `_score_interval`."""

    def excess(delta: float) -> float:
        linear = -b - c + (2.0 * n - b + c) * delta
        root = math.sqrt(max(0.0, linear * linear + 8.0 * n * c * delta * (1.0 - delta)))
        q = (root - linear) / (4.0 * n)
        variance = n * max(0.0, 2.0 * q + delta * (1.0 - delta)) + n * n * further
        return n * delta - (b - c) - critical * math.sqrt(variance)

    estimate = (b - c) / n
    if excess(1.0) <= 0.0:
        return 1.0
    return float(scipy.optimize.brentq(excess, estimate, 1.0, xtol=1e-10))
