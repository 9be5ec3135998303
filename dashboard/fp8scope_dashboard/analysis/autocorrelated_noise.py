"""Within-pair noise: the uncertainty of a mean difference over serially correlated steps.

Pages label these intervals *within-pair noise*: they show how precisely this pair's difference is known, not
what another seed would give. Runs of identical configurations differ by more.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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


def hac_interval(values: Floats, alpha: float, lags: int | None = None) -> tuple[float, float]:
    """Interval of the mean of serially correlated values: normal quantile, Newey-West standard error."""
    mean = float(values.mean())
    # Squares of large values overflow. Scaling by a power of two does not round.
    _, exponent = math.frexp(float(np.abs(values).max()))
    error = math.sqrt(long_run_variance(np.ldexp(values, -exponent), lags) / len(values))
    half = float(scipy.stats.norm.isf(alpha / 2.0)) * math.ldexp(error, exponent)
    return mean - half, mean + half


def moving_band(values: Floats, width: int, alpha: float) -> tuple[Floats, Floats, Floats]:
    """Moving mean of float64[n] values and its within-pair noise band: (mean, low, high), each float64[n].

    The window is centred, `width` points wide and shorter at the ends. The long-run variance of each window
    is computed from the residuals about the moving mean, in O(n L) time.
    """
    n = len(values)
    if n == 0:
        return values, values, values
    half = max(width, 1) // 2
    start = np.maximum(np.arange(n) - half, 0)
    stop = np.minimum(np.arange(n) + half + 1, n)
    count = (stop - start).astype(np.float64)
    mean = _window_sums(values, start, stop) / count
    residuals = values - mean
    lags = newey_west_lags(2 * half + 1)
    variance = _window_sums(residuals * residuals, start, stop)
    for lag in range(1, min(lags, n - 1) + 1):
        products = np.zeros(n)
        products[lag:] = residuals[lag:] * residuals[:-lag]
        weight = 2.0 * (1.0 - lag / (lags + 1.0))
        variance += weight * _window_sums(products, np.minimum(start + lag, stop), stop)
    # The mean takes one degree of freedom. A window of one point has no variance.
    error = np.sqrt(np.maximum(variance, 0.0) / np.maximum(count - 1.0, 1.0) / count)
    reach = float(scipy.stats.norm.isf(alpha / 2.0)) * error
    return mean, mean - reach, mean + reach


def _window_sums(values: Floats, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(sums[stop] - sums[start], dtype=np.float64)
