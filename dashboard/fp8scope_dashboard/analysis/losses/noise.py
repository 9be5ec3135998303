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

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

# Largest coefficient for which the long-run variance is estimated: beyond it the level is not identified.
LARGEST_CORRELATION = 0.98
# The noise is estimated on at least so many points, if there are so many.
LEAST_POINTS = 20
# Parts of the recent half of a curve whose levels are compared: each is about as long as the last window.
DRIFT_PARTS = 5
RESAMPLES = 300
# A longer series is averaged to this many points before it is resampled.
RESAMPLED_POINTS = 128


@dataclass(frozen=True)
class Noise:
    """Noise of the mean of the last points of a difference, at J looks.

    Attributes:
        variance: float64[J], long-run variance: of sqrt(m) times a mean over m points.
        freedom: float64[J], effective number of independent points of the estimate, less the two that the
            level and the correlation take; at least 1.
        drift: float64[J], standard deviation of the level between parts of the recent half that the long-run
            variance does not explain.
    """

    variance: Floats
    freedom: Floats
    drift: Floats


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


def prewhitened(sums: Sums, start: Indices, stop: Indices) -> tuple[Floats, Floats]:
    """Long-run variance and first autocorrelation of values[start:stop], float64[J] each.

    An AR(1) is fitted, with Kendall's (1954) correction of the bias of its coefficient, (1 + 3 a) / n. The
    long-run variance of its innovations (Newey and West, 1987) is divided by (1 - a)^2: Andrews and Monahan
    (1992). Negative coefficients count as 0.
    """
    count = (stop - start).astype(np.float64)
    lags = np.array([newey_west_lags(int(n)) for n in count])
    most = min(int(lags.max(initial=0)), len(sums.products) - 2)
    covariances = [sums.autocovariance(start, stop, lag) for lag in range(most + 2)]
    variance = np.maximum(covariances[0], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        raw = np.where(variance > 0.0, covariances[1] / variance, 0.0)
    corrected = np.clip(raw + (1.0 + 3.0 * raw) / count, 0.0, LARGEST_CORRELATION)

    def innovation(lag: int) -> Floats:
        before, after = covariances[abs(lag - 1)], covariances[lag + 1]
        return np.asarray((1.0 + raw * raw) * covariances[lag] - raw * (before + after))

    total = innovation(0)
    for lag in range(1, most + 1):
        weight = np.where(lag <= lags, 1.0 - lag / (lags + 1.0), 0.0)
        total = total + 2.0 * weight * innovation(lag)
    # Correlations that cancel must not make the noise smaller than that of independent innovations.
    total = np.maximum(total, innovation(0)) * count / np.maximum(count - 2.0, 1.0)
    return np.maximum(total, 0.0) / (1.0 - corrected) ** 2, corrected


def noise_of(sums: Sums, stop: Indices) -> Noise:
    """The noise at each look: from the recent half of the points before `stop`, or more of a short curve."""
    start = np.maximum(np.minimum(stop // 2, stop - LEAST_POINTS), 0)
    variance, correlation = prewhitened(sums, start, stop)
    count = (stop - start).astype(np.float64)
    freedom = np.maximum(count * (1.0 - correlation) / (1.0 + correlation) - 2.0, 1.0)
    return Noise(variance, freedom, _drift(sums, start, stop, variance))


def _drift(sums: Sums, start: Indices, stop: Indices, variance: Floats) -> Floats:
    """Standard deviation between the levels of DRIFT_PARTS parts, less what the noise explains."""
    edges = start + ((stop - start) * np.arange(DRIFT_PARTS + 1)[:, None]) // DRIFT_PARTS
    sizes = np.maximum(np.diff(edges, axis=0), 1)
    levels = (sums.first[edges[1:]] - sums.first[edges[:-1]]) / sizes
    excess = levels.var(axis=0, ddof=1) - variance / sizes.mean(axis=0)
    return np.asarray(np.sqrt(np.maximum(excess, 0.0)))


def hac_interval(values: Floats, alpha: float, lags: int | None = None) -> tuple[float, float]:
    """Interval of the mean of serially correlated values: normal quantile, Newey-West standard error."""
    mean = float(values.mean())
    # Squares of large values overflow. Scaling by a power of two does not round.
    _, exponent = math.frexp(float(np.abs(values).max()))
    error = math.sqrt(long_run_variance(np.ldexp(values, -exponent), lags) / len(values))
    half = -float(scipy.special.ndtri(alpha / 2.0)) * math.ldexp(error, exponent)
    return mean - half, mean + half


def bootstrap_interval(values: Floats, alpha: float, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean by the stationary bootstrap (Politis and Romano, 1994).

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
