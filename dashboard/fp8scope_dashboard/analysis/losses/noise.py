"""The noise of one pair of runs: how precisely the level of their serially correlated difference is known.

These figures describe *this pair*. They do not say what another seed would give: runs of identical
configurations differ by more. `seeds` has that part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.serial_noise import unbiased

Indices = NDArray[np.int64]

# Largest correlation of successive points: beyond it a level cannot be distinguished from a random walk.
MAX_CORRELATION = 0.98
# The correlation is taken to be so many standard errors larger than its estimate: short series hide it.
# docs/methods/loss_verdicts.md has the error that this gives.
CORRELATION_ERRORS = 2.0
# The noise is estimated on at least so many points, if there are so many.
MIN_POINTS = 20
# Parts of a stretch whose levels are compared.
DRIFT_PARTS = 5
# The scatter of two stretches differs if their ratio is outside the two-sided 90 % interval of F.
SCATTER_LEVEL = 0.95
# Successive differences of independent values have about so many degrees of freedom each (von Neumann, 1941).
FREEDOM_OF_DIFFERENCE = 2.0 / 3.0
RESAMPLES = 300
# A longer series is averaged to this many points before it is resampled.
RESAMPLED_POINTS = 128


@dataclass(frozen=True)
class Noise:
    """The distance of the mean of a window from the level of a difference, at J looks.

    Attributes:
        variance: float64[J], of the window's mean.
        freedom: float64[J], degrees of freedom of its estimate.
        drift: float64[J], standard deviation of the level between parts of the stretch that the variance is
            estimated on, as far as the variance does not explain it.
    """

    variance: Floats
    freedom: Floats
    drift: Floats

    def scaled(self, factor: Floats) -> Noise:
        """The same noise with `factor` times the variance."""
        return Noise(self.variance * factor, self.freedom, self.drift * np.sqrt(factor))


class Sums:
    """Prefix sums of a series and of its lagged products. A sum over any range then takes O(1)."""

    def __init__(self, values: Floats, lags: int) -> None:
        # Differences of prefix sums cancel: a level far from 0 would cost digits.
        self.centre = float(np.median(values)) if len(values) else 0.0
        self.values = values - self.centre
        self.first = np.concatenate([[0.0], np.cumsum(self.values)])
        self.products = []
        for lag in range(min(lags, max(len(values) - 1, 0)) + 1):
            product = np.zeros(len(values) + 1)
            product[lag + 1 :] = np.cumsum(self.values[lag:] * self.values[: len(values) - lag])
            self.products.append(product)
        squares = np.diff(self.values) ** 2
        # scatter[i] is the sum over the first i values' differences from the value before.
        self.scatter = np.concatenate([[0.0], np.cumsum(np.concatenate([[0.0], squares]))])

    def means(self, start: Indices, stop: Indices) -> Floats:
        """Means of values[start:stop]."""
        return np.asarray((self.first[stop] - self.first[start]) / (stop - start) + self.centre)

    def autocovariance(self, start: Indices, stop: Indices, lag: int) -> Floats:
        """Autocovariances of values[start:stop] about their mean, divided by the number of values."""
        count = stop - start
        mean = (self.first[stop] - self.first[start]) / count
        begin, end = np.minimum(start + lag, stop), np.maximum(stop - lag, start)
        products = self.products[lag][stop] - self.products[lag][begin]
        sides = (self.first[stop] - self.first[begin]) + (self.first[end] - self.first[start])
        return np.asarray((products - mean * sides + np.maximum(count - lag, 0) * mean * mean) / count)

    def squared_difference(self, start: Indices, stop: Indices) -> Floats:
        """Mean squared difference of successive values of values[start:stop]."""
        first = np.minimum(start + 1, stop)
        return np.asarray((self.scatter[stop] - self.scatter[first]) / np.maximum(stop - first, 1))


def newey_west_lags(n: int) -> int:
    """Number of autocovariances for n values: floor(4 (n/100)^(2/9)) (Newey and West, 1994)."""
    return min(max(int(4.0 * (n / 100.0) ** (2.0 / 9.0)), 0), max(n - 1, 0))


def long_run_variance(values: Floats, lags: int | None = None) -> float:
    """Variance of sqrt(n) times the mean of float64[n] serially correlated values, Bartlett weights.

    gamma_0 + 2 sum_{l=1..L} (1 - l/(L+1)) gamma_l (Newey and West, 1987), never negative. 0 for n < 2.
    """
    n = len(values)
    if n < 2:
        return 0.0
    lags = newey_west_lags(n) if lags is None else min(lags, n - 1)
    centred = values - values.mean()
    total = float(centred @ centred)
    for lag in range(1, lags + 1):
        total += 2.0 * (1.0 - lag / (lags + 1.0)) * float(centred[lag:] @ centred[:-lag])
    return max(total / n, 0.0)


@dataclass(frozen=True)
class _Fit:
    """An AR(1) that is fitted to values[start:stop] at J looks; float64[J] each.

    Attributes:
        count: number of values.
        variance: of the values about their mean.
        correlation: of successive values, at least 0, with Kendall's (1954) correction of its bias.
        innovation: long-run variance of the innovations (Newey and West, 1987), at least that of independent
            ones: correlations that cancel must not make the noise smaller.
    """

    count: Floats
    variance: Floats
    correlation: Floats
    innovation: Floats


def _fitted(sums: Sums, start: Indices, stop: Indices) -> _Fit:
    count = (stop - start).astype(np.float64)
    lags = np.array([newey_west_lags(int(n)) for n in count])
    most = min(int(lags.max(initial=0)), len(sums.products) - 2)
    covariances = [sums.autocovariance(start, stop, lag) for lag in range(most + 2)]
    variance = np.maximum(covariances[0], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        raw = np.where(variance > 0.0, covariances[1] / variance, 0.0)
        corrected = np.clip(unbiased(raw, count), 0.0, MAX_CORRELATION)

    def innovation(lag: int) -> Floats:
        before, after = covariances[abs(lag - 1)], covariances[lag + 1]
        return np.asarray((1.0 + raw * raw) * covariances[lag] - raw * (before + after))

    total = independent = innovation(0)
    for lag in range(1, most + 1):
        weight = np.where(lag <= lags, 1.0 - lag / (lags + 1.0), 0.0)
        total = total + 2.0 * weight * innovation(lag)
    total = np.maximum(total, independent) * count / np.maximum(count - 2.0, 1.0)
    return _Fit(count, variance, corrected, np.maximum(total, 0.0))


def prewhitened(sums: Sums, start: Indices, stop: Indices) -> tuple[Floats, Floats]:
    """Long-run variance and correlation of successive values of values[start:stop], float64[J] each.

    The long-run variance of the innovations of an AR(1), divided by (1 - a)^2: Andrews and Monahan (1992).
    """
    fit = _fitted(sums, start, stop)
    return fit.innovation / (1.0 - fit.correlation) ** 2, fit.correlation


def share_of_mean(correlation: Floats, points: Floats) -> Floats:
    """Variance of the mean of m points of an AR(1) process over the variance of one point.

    (1/m) [(1 + a)/(1 - a) - 2 a (1 - a^m) / (m (1 - a)^2)] for coefficients 0 <= a < 1: 1/m for a = 0, and
    never above 1, which the long-run variance over m exceeds on short windows.
    """
    rest = 1.0 - correlation
    edges = 2.0 * correlation * (1.0 - correlation**points) / (points * rest**2)
    return np.asarray(((1.0 + correlation) / rest - edges) / points)


def noise_of(sums: Sums, start: Indices, stop: Indices) -> Noise:
    """The noise of the mean over each window values[start:stop].

    It is estimated on the recent half of the points before `stop`, or more of a short curve. Its scale is
    that of the window where their scatters differ: the noise of a difference usually falls during a training.
    """
    return _on_stretch(sums, _recent(stop), stop, start, stop)


def _recent(stop: Indices) -> Indices:
    """Return where the stretch begins on which the noise of a window that ends at `stop` is estimated."""
    return np.asarray(np.maximum(np.minimum(stop // 2, stop - MIN_POINTS), 0))


def _on_stretch(sums: Sums, begin: Indices, end: Indices, start: Indices, stop: Indices) -> Noise:
    """The noise of means over values[start:stop], estimated on values[begin:end]."""
    fit = _fitted(sums, begin, end)
    error = np.sqrt((1.0 - fit.correlation**2) / fit.count)
    correlation = np.clip(fit.correlation + CORRELATION_ERRORS * error, 0.0, MAX_CORRELATION)
    freedom = np.maximum(fit.count - 2.0, 1.0)
    # Two estimates of the variance of a point: from the innovations, and about the stretch's own mean, which
    # follows a wandering level.
    about_mean = fit.variance * fit.count / np.maximum(fit.count - 1.0, 1.0)
    of_point = np.maximum(fit.innovation / (1.0 - correlation**2), about_mean)
    edges = begin + ((end - begin) * np.arange(DRIFT_PARTS + 1)[:, None]) // DRIFT_PARTS
    sizes = np.maximum(np.diff(edges, axis=0), 1)
    levels = (sums.first[edges[1:]] - sums.first[edges[:-1]]) / sizes
    explained = of_point * share_of_mean(correlation, sizes.mean(axis=0))
    drift = np.sqrt(np.maximum(levels.var(axis=0, ddof=1) - explained, 0.0))
    variance = of_point * share_of_mean(correlation, (stop - start).astype(np.float64))
    return Noise(variance, freedom, drift).scaled(_scale(sums, begin, end, start, stop))


def _scale(sums: Sums, begin: Indices, end: Indices, start: Indices, stop: Indices) -> Floats:
    """By how much the variance in the window surely differs from that on the stretch; 1 if it may be equal.

    The ratio of the mean squared successive differences, which no slow wander enters, moved towards 1 by the
    quantile of F.
    """
    window, stretch = sums.squared_difference(start, stop), sums.squared_difference(begin, end)
    ratio = np.divide(window, stretch, out=np.ones_like(window), where=stretch > 0.0)
    counts = [
        np.maximum((last - first - 1) * FREEDOM_OF_DIFFERENCE, 1.0)
        for first, last in ((begin, end), (start, stop))
    ]
    largest = ratio * scipy.special.fdtri(counts[0], counts[1], SCATTER_LEVEL)
    least = ratio / scipy.special.fdtri(counts[1], counts[0], SCATTER_LEVEL)
    return np.asarray(np.maximum(np.minimum(largest, 1.0), least))


def hac_interval(values: Floats, alpha: float, lags: int | None = None) -> tuple[float, float]:
    """Interval of the mean of serially correlated values, float64[N], N >= 1.

    Normal quantile, standard error of Newey and West (1987) with `lags` lags; see `long_run_variance`.
    """
    mean = float(values.mean())
    # Squares of large values overflow. Scaling by a power of two does not round.
    _, exponent = math.frexp(float(np.abs(values).max()))
    error = math.sqrt(long_run_variance(np.ldexp(values, -exponent), lags) / len(values))
    half = -float(scipy.special.ndtri(alpha / 2.0)) * math.ldexp(error, exponent)
    return mean - half, mean + half


def bootstrap_interval(values: Floats, alpha: float, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of float64[N] by the stationary bootstrap (Politis and Romano, 1994).

    Blocks have geometric lengths with mean n^(1/3), and wrap around. The draws are fixed by `seed`, so equal
    data gives an equal interval.
    """
    group = -(-len(values) // RESAMPLED_POINTS)
    n = len(values) // group
    points = values[len(values) - n * group :].reshape(n, group).mean(axis=1)
    draws = np.random.default_rng(seed)
    begins = draws.random((RESAMPLES, n)) < n ** (-1.0 / 3.0)
    begins[:, 0] = True
    position = np.arange(n)
    origin = np.maximum.accumulate(np.where(begins, position, 0), axis=1)
    first = draws.integers(0, n, (RESAMPLES, n))
    indices = (np.take_along_axis(first, origin, axis=1) + position - origin) % n
    low, high = np.quantile(points[indices].mean(axis=1), [alpha / 2.0, 1.0 - alpha / 2.0])
    return float(low), float(high)
