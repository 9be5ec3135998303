"""The strong line of a noisy curve. Pure functions of arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LONGEST_SPAN = 401


def default_span(points: int) -> int:
    """The number of points to average over, odd: enough to calm the line, few enough to keep its bends."""
    return min(LONGEST_SPAN, points // 40) | 1


def centred_average(values: Floats, span: int) -> Floats:
    """Mean over `span` points around each of float64[N], fewer at the ends, always as many on either side.

    An average of past points alone would lag behind a falling loss and make every run look worse than it is.
    Values that are not finite have no weight; at their places the result is NaN: the line breaks there.

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


def _around(values: Floats, half: int) -> Floats:
    """Sums over up to `half` points on either side.

    By convolution, not as differences of a running sum: one value of 1e30 must not drown those far from it.
    """
    count = len(values)
    sums = np.empty(count)
    sums[half : count - half] = np.convolve(values, np.ones(2 * half + 1), mode="valid")
    for i in range(half):
        sums[i] = values[: 2 * i + 1].sum()
        sums[count - 1 - i] = values[count - 1 - 2 * i :].sum()
    return sums
