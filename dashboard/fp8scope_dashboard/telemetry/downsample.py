"""Fewer points for a line chart, without losing what a person looks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from tsdownsample import MinMaxDownsampler, MinMaxLTTBDownsampler

from fp8scope_dashboard.telemetry.codec import Float64s, Int64s

FEWEST = 8
MIN_MAX: Any = MinMaxDownsampler()  # type: ignore[no-untyped-call]
MIN_MAX_LTTB: Any = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]


def keep(steps: Int64s, values: Float64s, points: int) -> Int64s:
    """Choose the indices of at most `points` samples to draw, in order.

    Half of them by MinMaxLTTB (Van Der Donckt et al., 2023), which keeps the look of the line. The other half
    is the minimum and the maximum of each of points // 4 buckets of equally many samples, so that no one-step
    spike is lost: the LTTB step alone keeps only one of two spikes that are close to each other. Of the first
    half, points // 8 go to the samples that stand out most from both neighbours, so that several in
    one bucket stay.
    First and last sample are always kept. Values that are not finite are chosen apart (up to half as many,
    taken from those points): the two ends of each stretch of them, thinned evenly where these are too many.

    Args:
        steps: int64[N], increasing.
        values: float64[N], NaN and infinities allowed.
        points: at least 8.

    Raises:
        ValueError: fewer points than 8 are asked for.
    """
    if points < FEWEST:
        raise ValueError(f"points must be at least {FEWEST}, not {points}")
    if len(values) <= points:
        return np.arange(len(values))
    finite = np.isfinite(values)
    if finite.all():
        return _keep_finite(steps, values, points)
    strange = _ends_of_stretches(~finite, points // 2)
    regular = np.flatnonzero(finite)
    kept = _keep_finite(steps[regular], values[regular], points - len(strange))
    return np.union1d(strange, regular[kept])


def _ends_of_stretches(mask: np.ndarray[tuple[int], np.dtype[np.bool_]], most: int) -> Int64s:
    padded = np.concatenate(([False], mask, [False]))
    changes = np.flatnonzero(padded[1:] != padded[:-1])
    ends = np.union1d(changes[::2], changes[1::2] - 1)
    if len(ends) > most:
        ends = ends[np.linspace(0, len(ends) - 1, most).round().astype(np.int64)]
    return ends


def _keep_finite(steps: Int64s, values: Float64s, points: int) -> Int64s:
    if len(values) <= points:
        return np.arange(len(values))
    buckets = points // 4
    extremes = MIN_MAX.downsample(values, n_out=2 * buckets)
    spikes = _sharpest(values, points // 8)
    room = max(3, points - 2 * buckets - len(spikes))
    shape = MIN_MAX_LTTB.downsample(np.ascontiguousarray(steps), values, n_out=room)
    kept: Int64s = np.union1d(np.union1d(extremes, shape), spikes).astype(np.int64)
    return kept


def _sharpest(values: Float64s, count: int) -> Int64s:
    """The samples that stand out most from both of their neighbours, on the same side."""
    slopes = np.diff(values)
    before, after = slopes[:-1], slopes[1:]
    # A product of slopes could underflow; their signs cannot.
    turns = np.flatnonzero(((before > 0) & (after < 0)) | ((before < 0) & (after > 0)))
    if len(turns) > count:
        height = np.minimum(np.abs(before[turns]), np.abs(after[turns]))
        turns = turns[np.argpartition(height, len(height) - count)[len(height) - count :]]
    return turns + 1
