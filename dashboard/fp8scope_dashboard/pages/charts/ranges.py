"""Axis ranges that are robust against diverged runs. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats

Range = tuple[float, float]

# Space above and below the data, as a fraction of their extent.
PADDING = 0.06
# The range includes rises up to this fraction of the whole fall above the initial loss.
HEADROOM = 0.15
# A loss below minus this multiple of its initial value is broken.
ABSURD = 10.0


def loss_range(curves: Sequence[Floats]) -> Range | None:
    """A range for losses: from the lowest value to slightly above the initial values.

    A loss that rises far above its initial value has diverged and is marked at the edge instead. Returns
    None if no curve has a finite value.
    """
    finite = [values[np.isfinite(values)] for values in curves]
    finite = [values for values in finite if len(values)]
    if not finite:
        return None
    low = min(_floor(values) for values in finite)
    top = max(_initial_value(values) for values in finite)
    limit = top + HEADROOM * (top - low)
    high = max(float(values[values <= limit].max(initial=low)) for values in finite)
    return _padded(low, max(high, low))


def central_range(curves: Sequence[Floats], *, from_zero: bool = False) -> Range | None:
    """A range for scalars such as tokens per second: the central 98 %, extended by a third on each side."""
    pooled = np.concatenate([values[np.isfinite(values)] for values in curves]) if curves else np.zeros(0)
    if not len(pooled):
        return None
    inner_low, inner_high = np.quantile(pooled, [0.01, 0.99])
    room = (inner_high - inner_low) / 3.0
    low = max(float(pooled.min()), float(inner_low - room))
    high = min(float(pooled.max()), float(inner_high + room))
    low, high = _padded(min(0.0, low) if from_zero else low, high)
    # Nothing is below zero, so neither is the axis.
    return (0.0, high) if from_zero and pooled.min() >= 0.0 else (low, high)


def _floor(values: Floats) -> float:
    """The lowest value, or a lower limit if values are implausibly far below zero."""
    low = float(values.min())
    # A quantile is slow, and no usual loss is below -ABSURD.
    if low >= -ABSURD or low >= -ABSURD * abs(_initial_value(values)):
        return low
    quarter, middle = np.quantile(values, [0.25, 0.5])
    return float(max(low, quarter - 3.0 * max(middle - quarter, 0.1 * abs(middle))))


def _initial_value(values: Floats) -> float:
    """The 95 % quantile of a curve's first tenth, which ignores single spikes."""
    first = values[: max(5, len(values) // 10)]
    return float(np.quantile(first, 0.95))


def _padded(low: float, high: float) -> Range:
    extent = high - low
    if extent <= 0:
        extent = abs(high)
    # A part of a denormal number rounds to 0.
    if extent < np.finfo(np.float64).tiny:
        extent = 1.0
    return low - PADDING * extent, high + PADDING * extent
