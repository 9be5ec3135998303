"""Thin a line for a chart, keeping its shape, its extremes and its gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
from tsdownsample import MinMaxDownsampler, MinMaxLTTBDownsampler

from fp8scope_dashboard.telemetry.codec import Float64s, Int64s

MIN_POINTS = 8
MIN_MAX: Any = MinMaxDownsampler()  # type: ignore[no-untyped-call]
MIN_MAX_LTTB: Any = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]


def keep(steps: Int64s, values: Float64s, points: int) -> Int64s:
    """Choose the indices of at most `points` samples to draw, in order.

    Half of them are the minimum and the maximum of each of points // 4 buckets of equally many samples, so
    that no one-step spike is lost: MinMaxLTTB alone keeps only one of two spikes that are close together. A
    further points // 8 are the samples that differ most from both neighbours, so that several spikes in one
    bucket are kept. The rest is chosen by MinMaxLTTB (Van Der Donckt et al., 2023), which keeps the shape.

    The first and the last sample are always kept. Of each stretch of non-finite values both ends are kept; if
    there are more than points // 2 such ends, they are thinned evenly. They count as part of `points`.

    Args:
        steps: int64[N], increasing.
        values: float64[N], NaN and infinities allowed.
        points: at least 8.

    Raises:
        ValueError: `points` is less than 8.
    """
    if points < MIN_POINTS:
        raise ValueError(f"points must be at least {MIN_POINTS}, not {points}")
    if len(values) <= points:
        return np.arange(len(values))
    finite = np.isfinite(values)
    if finite.all():
        return _keep_finite(steps, values, points)
    nonfinite = _ends_of_stretches(~finite, points // 2)
    regular = np.flatnonzero(finite)
    chosen = _keep_finite(steps[regular], values[regular], points - len(nonfinite))
    return np.union1d(nonfinite, regular[chosen])


def _ends_of_stretches(mask: np.ndarray[tuple[int], np.dtype[np.bool_]], max_ends: int) -> Int64s:
    padded = np.concatenate(([False], mask, [False]))
    changes = np.flatnonzero(padded[1:] != padded[:-1])
    ends = np.union1d(changes[::2], changes[1::2] - 1)
    if len(ends) > max_ends:
        ends = ends[np.linspace(0, len(ends) - 1, max_ends).round().astype(np.int64)]
    return ends


def _keep_finite(steps: Int64s, values: Float64s, points: int) -> Int64s:
    if len(values) <= points:
        return np.arange(len(values))
    buckets = points // 4
    extremes = MIN_MAX.downsample(values, n_out=2 * buckets)
    spikes = _sharpest(values, points // 8)
    room = max(3, points - 2 * buckets - len(spikes))
    shape = MIN_MAX_LTTB.downsample(np.ascontiguousarray(steps), values, n_out=room)
    positions: Int64s = np.union1d(np.union1d(extremes, shape), spikes).astype(np.int64)
    return positions


def _sharpest(values: Float64s, count: int) -> Int64s:
    """The samples that differ most from both neighbours, in the same direction."""
    slopes = np.diff(values)
    before, after = slopes[:-1], slopes[1:]
    # Compare signs, because a product of slopes could underflow.
    turns = np.flatnonzero(((before > 0) & (after < 0)) | ((before < 0) & (after > 0)))
    if len(turns) > count:
        height = np.minimum(np.abs(before[turns]), np.abs(after[turns]))
        turns = turns[np.argpartition(height, len(height) - count)[len(height) - count :]]
    return turns + 1
