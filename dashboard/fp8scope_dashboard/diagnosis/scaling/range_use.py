"""The tensors that leave the range of their format, and when. Pure functions.

A tensor saturates if more than 0.1 % of its elements are clamped, on average over 16 steps: the limit of the
default alert rule. A working delayed scale clamps a few elements whenever the amax exceeds its history, about
once in `history` steps, which stays far below.

A tensor flushes if most of its non-zero elements become zero, or a quarter of them with a measured error of
more than 5 % of the signal (13 dB; a working cast is at 25 to 31 dB). A large share alone may be harmless:
elements that are 2^19 times smaller than the largest carry nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from fp8scope_dashboard.analysis.tensor_onsets import (
    SETTLED_STEPS,
    default_limit,
    early_median,
    first_sustained,
    tensor_limits,
)
from fp8scope_dashboard.diagnosis.change_points import change_points
from fp8scope_dashboard.diagnosis.tensors import TensorSeries
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.onsets import steps_in_words

LeavingKind = Literal["saturation", "underflow"]
SATURATED_SHARE: Final = 1e-3
FLUSHED_SHARE: Final = 0.5
FLUSHED_SHARE_WITH_ERROR: Final = 0.25
# Noise to signal.
LARGE_ERROR: Final = 0.05
WINDOW: Final = 16
# Rows of a run in which scales and losses are not settled.
WARM_UP: Final = 16
# Below this a share is zero, for logarithms.
MIN_SHARE: Final = 1e-7


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A tensor that leaves its range.

    Attributes:
        tensor: its position.
        onset: the step at which it begins; it lies after step `after`, and at `high` or before: see `_onset`.
        share: the largest mean share over WINDOW rows.
    """

    kind: LeavingKind
    tensor: int
    onset: int
    after: int
    high: int
    share: float

    @property
    def since(self) -> str:
        """The step of the onset, or the steps between which it lies, in words."""
        return steps_in_words(self.high, self.after)


def saturating(rows: TensorSeries) -> list[Leaving]:
    """The tensors that saturate, those that began first at the beginning."""
    shares = rows.share(rows.saturated)
    return _leaving("saturation", rows, shares, np.full(len(rows.tensors), SATURATED_SHARE))


def flushing(rows: TensorSeries) -> list[Leaving]:
    """The tensors of which most elements become zero, those that began first at the beginning."""
    shares = rows.share(rows.underflow)
    with np.errstate(invalid="ignore"):
        has_error = (rows.error > LARGE_ERROR).any(axis=1)
    return _leaving("underflow", rows, shares, np.where(has_error, FLUSHED_SHARE_WITH_ERROR, FLUSHED_SHARE))


def rolling_mean(values: Floats, window: int) -> Floats:
    """Means of `window` neighbours: float64[n - window + 1]; of all values if there are fewer."""
    width = min(window, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means: Floats = (sums[width:] - sums[:-width]) / width
    return means


def _leaving(kind: LeavingKind, rows: TensorSeries, shares: Floats, limits: Floats) -> list[Leaving]:
    tensors = []
    for position, (row, limit) in enumerate(zip(shares, limits, strict=True)):
        observed = np.flatnonzero(np.isfinite(row))
        settled = observed[observed >= WARM_UP] if rows.begins else observed
        if len(settled) < WINDOW // 2:
            continue
        share = float(rolling_mean(row[settled], WINDOW).max())
        if share > limit:
            # Onsets count from where alerts and the ranking count them, which is earlier.
            counted = rows.steps >= int(rows.steps[0]) + SETTLED_STEPS if rows.begins else rows.steps >= 0
            counted &= np.isfinite(row)
            values, steps = row[counted], rows.steps[counted]
            begin, low, high = _onset(kind, values, float(limit))
            after = int(steps[low - 1]) if low else int(rows.steps[observed[0]]) - 1
            tensors.append(
                Leaving(
                    kind=kind,
                    tensor=position,
                    onset=int(steps[begin]),
                    after=after,
                    high=int(steps[high]),
                    share=share,
                )
            )
    return sorted(tensors, key=lambda tensor: (tensor.onset, -tensor.share))


def _onset(kind: LeavingKind, values: Floats, limit: float) -> tuple[int, int, int]:
    """The row of the onset, and the first and last row at which it may be.

    It is the first sustained row above the tensor's limit, as in the ranking of tensors
    (`analysis.tensor_onsets`): a change-point of a slow rise lies far behind its beginning. Where nothing is
    sustained, it is the first change-point that leads above the limit, else the first row above it.
    """
    statistic = f"{kind}_rate"
    row = values[None, :]
    over = row > tensor_limits(early_median(row), statistic, default_limit(statistic))[:, None]
    first = int(first_sustained(over, np.ones_like(over))[0])
    if first >= 0:
        return first, first, first
    logarithms = np.log10(np.maximum(values, MIN_SHARE))
    for change in change_points(logarithms):
        after = values[change.index : change.index + WINDOW]
        if change.after > change.before and after.mean() > limit / 2.0:
            last = len(values) - 1
            return change.index, min(change.low, last), min(change.high, last)
    first = int(np.argmax(values > limit))
    return first, first, first
