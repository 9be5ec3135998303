"""The effect of a format with one scale for the whole tensor.

A histogram of exponents counts elements in bins 2^e <= |x| < 2^(e+1). Multiplied by a power of two, an
element only changes its bin, so all elements of a bin saturate, or none, or all flush to zero, or none,
except in two bins:

* the bin that contains M, the largest value of the format: M is not a power of two. It holds no saturated
  element if amax * s <= M, as with any scale that is computed from the tensor's own amax.
* the bin that begins at half of the smallest subnormal: exactly this value is rounded to zero (ties to even),
  and every larger value of the bin to the smallest subnormal.

With another scale the second limit, too, lies inside a bin. Results are then bounds, and the estimate assumes
that elements are spread evenly within a bin.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.distribution import Bounds, Distribution, Effect
from fp8scope_dashboard.analysis.what_if.formats import NumberFormat
from fp8scope_dashboard.statistics.arrays import Floats

Mask = NDArray[np.bool_]

# Positions within a bin at which the error is evaluated for the estimate.
POINTS = 8
MAX_SCALE = float(np.finfo(np.float32).max)
MIN_SCALE = float(np.finfo(np.float32).tiny)


def scale_from_amax(amax: Floats, format: NumberFormat, margin: int, *, power_of_two: bool = False) -> Floats:
    """s = M * 2^-margin / amax in float32, as float64[T]; 1 where amax is 0 or not finite.

    The rule of the kernels' `amax_to_scale`. `power_of_two` rounds s down to a power of two.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = np.float32(format.largest * 2.0**-margin) / amax.astype(np.float32)
        scale = np.clip(scale, np.float32(MIN_SCALE), np.float32(MAX_SCALE)).astype(np.float64)
        if power_of_two:
            scale = np.ldexp(1.0, np.frexp(scale)[1] - 1)
    return np.where((amax > 0) & np.isfinite(amax), scale, 1.0)


def tensor_effect(tensors: Distribution, format: NumberFormat, scale: Floats) -> Effect:
    """The effect of multiplying each tensor by `scale`, float64[T], and casting it with saturation.

    A scale is rounded to float32, in which kernels multiply.
    """
    exact = scale.astype(np.float32).astype(np.float64)
    return Effect(
        saturated(tensors, format, exact).per(tensors.numel),
        flushed(tensors, format, exact).per(tensors.numel),
        error(tensors, format, exact),
        floor_error(tensors, format, exact),
        exact,
    )


def saturated(tensors: Distribution, format: NumberFormat, scale: Floats) -> Bounds:
    """The number of finite elements with |x*s| above M by more than float32's rounding.

    The product is monotone in x even after rounding, and exact for powers of two; so the ends of a bin
    decide for all its elements.
    """
    low_end, high_end = tensors.lower * scale[:, None], tensors.upper * scale[:, None]
    sure = low_end > format.limit
    possible = (2.0 * low_end > format.limit) & ~sure
    bounds = _counted(tensors, sure, possible, _share(high_end - format.largest, high_end - low_end))
    with np.errstate(over="ignore", invalid="ignore"):
        peak = (tensors.amax.astype(np.float32) * scale.astype(np.float32)).astype(np.float64)
    # The largest element decides whether there are any.
    some, none = peak > format.limit, peak <= format.limit
    low = np.where(some, np.maximum(bounds.low, 1.0), bounds.low)
    high = np.where(none, 0.0, bounds.high)
    return Bounds(np.minimum(low, high), np.clip(bounds.estimate, np.minimum(low, high), high), high)


def flushed(tensors: Distribution, format: NumberFormat, scale: Floats) -> Bounds:
    """The number of elements that are not zero and become zero, with the scales float64[T] of T tensors."""
    low_end, high_end = tensors.lower * scale[:, None], tensors.upper * scale[:, None]
    sure = 2.0 * low_end <= format.flushed
    sure |= (high_end <= format.flushed) & (tensors.counts > 0)
    possible = (low_end <= format.flushed) & ~sure
    return _counted(tensors, sure, possible, _share(format.flushed - low_end, high_end - low_end))


def _counted(tensors: Distribution, sure: Mask, possible: Mask, share: Floats) -> Bounds:
    """Count bins that are `sure`, and the `share` of those that are `possible` for the estimate."""
    low = (tensors.counts * sure).sum(axis=1)
    split = tensors.counts * possible
    return Bounds(low, low + (split * share).sum(axis=1), low + split.sum(axis=1))


def _share(part: Floats, whole: Floats) -> Floats:
    """part / whole within 0 and 1; 0 where a bin has only one value."""
    return np.clip(np.divide(part, whole, out=np.zeros_like(part), where=whole > 0), 0.0, 1.0)


def error(tensors: Distribution, format: NumberFormat, scale: Floats) -> Bounds:
    """Σ(x − q/s)² / Σx² with the scales float64[T]: bounds for every tensor with this histogram, an estimate.

    The ratio is a mean of r = (x − q/s)² / x² with weights x². In each bin r and x² have bounds; the bounds
    of the mean give the bins with the largest r their largest weights, or their smallest.
    """
    low_end, high_end = tensors.lower * scale[:, None], tensors.upper * scale[:, None]
    least, most = _relative_bounds(low_end, high_end, format)
    weights = tensors.counts * low_end**2, tensors.counts * high_end**2
    noise, signal = _estimated(tensors, format, scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = np.where(signal > 0, noise / signal, np.nan)
    low = -_largest_mean(-least, *weights)
    high = np.minimum(_largest_mean(most, *weights), 1.0)
    return Bounds(low, np.clip(estimate, low, high), high)


def floor_error(tensors: Distribution, format: NumberFormat, scale: Floats) -> Floats:
    """The estimated error if the format had no limits of range, float64[T]: what its mantissa bits cost.

    `scale` is float64[T], one multiplier for each tensor. The exact error of amax is left out: if one element
    carries the tensor, that is 0 by chance.
    """
    unlimited = NumberFormat(format.name, np.inf, -1000, format.mantissa_bits)
    spread = replace(tensors, amax=np.full(len(tensors), np.nan))
    noise, signal = _estimated(spread, unlimited, scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(signal > 0, noise / signal, np.nan)


def rounding_step(y: Floats, format: NumberFormat) -> Floats:
    """The distance between neighbouring values of the format at y > 0, float64 of y's shape."""
    exponent = np.maximum(np.frexp(y)[1] - 1, format.min_exponent)
    return np.asarray(np.ldexp(1.0, exponent - format.mantissa_bits), np.float64)


def rounded(y: Floats, format: NumberFormat) -> Floats:
    """y > 0, of any shape, rounded to the nearest value of the format, ties to even, at most the largest."""
    step = rounding_step(y, format)
    return np.minimum(np.rint(y / step) * step, format.largest)


def squared_error(y: Floats, format: NumberFormat) -> Floats:
    """The mean square of y − q for y > 0, float64 of y's shape.

    Exact outside the range, step²/12 inside (uniform rounding).
    """
    inside = rounding_step(y, format) ** 2 / 12.0
    return np.where(
        y <= format.flushed, y**2, np.where(y > format.largest, (y - format.largest) ** 2, inside)
    )


def _relative_bounds(low_end: Floats, high_end: Floats, format: NumberFormat) -> tuple[Floats, Floats]:
    """The smallest and the largest ((y − q) / y)² of y in [low_end, high_end]."""
    # The step at the upper end is the largest of the bin; the relative error is largest at the lower end.
    half_step = rounding_step(high_end, format) / 2.0
    inside = np.minimum(half_step / low_end, 1.0) ** 2
    clipped = np.maximum(1.0 - format.largest / high_end, 0.0) ** 2
    most = np.where(low_end <= format.flushed, 1.0, np.maximum(inside, clipped))
    least = np.where(high_end <= format.flushed, 1.0, np.maximum(1.0 - format.largest / low_end, 0.0) ** 2)
    return least, most


def _largest_mean(values: Floats, lowest: Floats, highest: Floats) -> Floats:
    """The largest weighted mean of `values` over bins, float64[T], for weights in [lowest, highest].

    It has the highest weight in the bins with the largest values, and the lowest in the others.
    """
    order = np.argsort(-values, axis=1)
    values, lowest, highest = (np.take_along_axis(part, order, axis=1) for part in (values, lowest, highest))
    extra = highest - lowest
    numerator = (values * lowest).sum(axis=1, keepdims=True) + np.cumsum(values * extra, axis=1)
    denominator = lowest.sum(axis=1, keepdims=True) + np.cumsum(extra, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(denominator > 0, numerator / denominator, np.nan)
        return np.asarray(np.fmax.reduce(means, axis=1), np.float64)


def _estimated(tensors: Distribution, format: NumberFormat, scale: Floats) -> tuple[Floats, Floats]:
    """Σ(x*s − q)² and Σ(x*s)², float64[T], for elements that are spread evenly within their bins.

    One element of the highest bin is amax, if that is known; its error is exact. With a few very large
    elements it decides the result.
    """
    low_end, high_end = tensors.lower * scale[:, None], tensors.upper * scale[:, None]
    noise, signal = np.zeros(len(tensors)), np.zeros(len(tensors))
    observed = np.flatnonzero(np.isfinite(tensors.amax))
    counts = tensors.counts.copy()
    counts[observed, tensors.top[observed] - tensors.first] -= 1.0
    for point in range(POINTS):
        y = low_end + (high_end - low_end) * (point + 0.5) / POINTS
        noise += (counts * squared_error(y, format)).sum(axis=1) / POINTS
        signal += (counts * y**2).sum(axis=1) / POINTS
    peak = tensors.amax[observed] * scale[observed]
    noise[observed] += (rounded(peak, format) - peak) ** 2
    signal[observed] += peak**2
    return noise, signal
