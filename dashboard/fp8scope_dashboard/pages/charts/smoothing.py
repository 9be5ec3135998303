"""Smoothing of noisy curves. Pure functions of arrays."""

from __future__ import annotations

import numpy as np
import scipy

from fp8scope_dashboard.statistics.arrays import Floats

LONGEST_SPAN = 401


def default_span(points: int) -> int:
    """The odd number of points to average over for a curve of this length."""
    return min(LONGEST_SPAN, points // 40) | 1


def centred_average(values: Floats, span: int) -> Floats:
    """Centred mean over `span` points of float64[N]; windows at the ends are smaller but symmetric.

    An average of past points would lag behind a falling loss. Values that are not finite have no weight, and
    the result is NaN at their positions, so that the line has a gap.

    Raises:
        ValueError: span < 1 or even.
    """
    if span < 1 or span % 2 == 0:
        raise ValueError(f"span must be odd and at least 1, not {span}")
    half = min(span // 2, (len(values) - 1) // 2)
    if half < 1:
        return np.where(np.isfinite(values), values, np.nan)
    finite = np.isfinite(values)
    sums = _around(np.where(finite, values, 0.0), half)
    weights = _around(finite.astype(np.float64), half)
    result = np.full(len(values), np.nan)
    np.divide(sums, weights, out=result, where=finite)
    return result


def exponential_average(values: Floats, weight: float) -> Floats:
    """Average of float64[N] in which each earlier value counts `weight` times as much as the next one.

    The first values are not drawn towards 0. Values that are not finite have no weight, and the result is NaN
    at their positions.

    Raises:
        ValueError: the weight is below 0, or 1 or more.
    """
    if not 0.0 <= weight < 1.0:
        raise ValueError(f"weight must be from 0 to below 1, not {weight}")
    finite = np.isfinite(values)
    sums = scipy.signal.lfilter([1.0], [1.0, -weight], np.where(finite, values, 0.0))
    weights = scipy.signal.lfilter([1.0], [1.0, -weight], finite.astype(np.float64))
    result = np.full(len(values), np.nan)
    np.divide(sums, weights, out=result, where=finite)
    return result


def _around(values: Floats, half: int) -> Floats:
    """Sums over up to `half` points on either side.

    By convolution: in differences of a running sum, one value of 1e30 would cancel all later values.
    """
    count = len(values)
    sums = np.empty(count)
    sums[half : count - half] = np.convolve(values, np.ones(2 * half + 1), mode="valid")
    for i in range(half):
        sums[i] = values[: 2 * i + 1].sum()
        sums[count - 1 - i] = values[count - 1 - 2 * i :].sum()
    return sums
