"""The steps at which tensors went out of range, and the worst tensors: from the columns of a heat map. Pure
functions.

A column is the largest value of neighbouring steps, so that a single step over the limit makes a column over
it. An onset is *sustained* if of WINDOW observed columns that begin with it, at least SUSTAINED are over the
limit; the first such column is the tensor's onset. Fewer columns than SUSTAINED after it are not enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats

Mask = NDArray[np.bool_]

SUSTAINED: Final = 3
WINDOW: Final = 5
# A change is measured from the median of a tensor's first columns to the median of its last: this share of
# its observed columns, and at least EARLY_COLUMNS.
EARLY_SHARE: Final = 0.1
EARLY_COLUMNS: Final = 3
# Rates below this count as this when they are compared as a ratio: 0 has no logarithm.
MIN_RATE: Final = 1e-6
# A statistic that is no rate has left its range when it is this many powers of two from its early median.
CHANGE_LIMIT: Final = 2.0
RATE_LIMITS: Final = {
    # Ten times what the pages report at all: delayed scaling clips a few elements whenever amax rises.
    "overflow_rate": 1e-3,
    "saturation_rate": 1e-3,
    "nonfinite_rate": 0.0,
    "underflow_rate": 1e-2,
    "subnormal_rate": 1e-1,
}
DEFAULT_RATE_LIMIT: Final = 1e-2
# First steps of a run in which no onset is searched, because scales are not settled: those of the rules for
# overflow and underflow, as they come.
SETTLED_STEPS: Final = 10
# A few per cent of these are usual. A tensor is over its limit at this many times its own early median, but
# at this share in any case.
RELATIVE: Final = ("underflow_rate", "subnormal_rate")
RELATIVE_RISE: Final = 2.0
CERTAIN_SHARE: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The values that tensors are ranked by.

    Attributes:
        onset: int64[T], the column of the first sustained onset; -1 without one.
        now: float64[T], the largest value of the last observed columns; NaN without values.
        ever: float64[T], the largest value.
        before, after: float64[T], the medians of the first and of the last observed columns.
        change: float64[T], log2 of `after` over `before`; NaN where either is unknown.
    """

    onset: NDArray[np.int64]
    now: Floats
    ever: Floats
    before: Floats
    after: Floats
    change: Floats


def is_rate(statistic: str) -> bool:
    """Return whether a statistic is a share of a tensor's elements."""
    return statistic.endswith("_rate")


def default_limit(statistic: str) -> float:
    """The value above which a tensor is out of its range: a rate, or a change in powers of two."""
    return RATE_LIMITS.get(statistic, DEFAULT_RATE_LIMIT) if is_rate(statistic) else CHANGE_LIMIT


def tensor_limits(before: Floats, statistic: str, limit: float) -> Floats:
    """The value above which each tensor is out of its range, float64[T].

    Args:
        before: float64[T], the early median of each tensor; NaN if it was not observed.
        limit: see `default_limit`.
    """
    if statistic not in RELATIVE:
        return np.full(len(before), limit)
    own = np.minimum(RELATIVE_RISE * np.nan_to_num(before), CERTAIN_SHARE)
    return np.asarray(np.maximum(limit, own), np.float64)


def over_limit(values: Floats, before: Floats, statistic: str, limit: float) -> Mask:
    """The values over the limit of their tensor, bool[T, C].

    Args:
        values: float64[T, C]; before: float64[T], the early median of each tensor.
    """
    size = values if is_rate(statistic) else np.abs(log2_change(values, before, statistic))
    with np.errstate(invalid="ignore"):
        return np.asarray(size > tensor_limits(before, statistic, limit)[:, None])


def ranked(
    values: Floats, statistic: str, limit: float, recent: int = 1, *, counted: Floats | None = None
) -> Ranked:
    """Rank T tensors by the C columns of a heat map.

    Args:
        values: float64[T, C], NaN where a tensor was not observed.
        statistic: its name; rates are compared with the limit, other statistics by their change.
        limit: see `default_limit`.
        recent: the number of last columns that are `now`.
        counted: the values in which onsets are searched, float64[T, C]; by default all.
    """
    counted = values if counted is None else counted
    before, after = early_median(values), _median_of(values, late=True)
    return Ranked(
        onset=first_sustained(over_limit(counted, before, statistic, limit), ~np.isnan(counted)),
        now=_largest(values[:, max(values.shape[1] - recent, 0) :]),
        ever=_largest(values),
        before=before,
        after=after,
        change=log2_change(after[:, None], before, statistic)[:, 0],
    )


def first_sustained(
    over: Mask, observed: Mask, sustained: int = SUSTAINED, window: int = WINDOW
) -> NDArray[np.int64]:
    """The column of each tensor's first sustained onset, int64[T]; -1 without one.

    Args:
        over: bool[T, C], whether a column is over the limit.
        observed: bool[T, C]; other columns are skipped, as those between two sampled steps.
    """
    tensors, columns = over.shape
    if not columns:
        return np.full(tensors, -1, np.int64)
    # The observed columns first, in their order.
    order = np.argsort(~observed, axis=1, kind="stable")
    dense = np.take_along_axis(over & observed, order, axis=1)
    total = np.concatenate([np.zeros((tensors, 1), np.int64), np.cumsum(dense, axis=1)], axis=1)
    ends = np.minimum(np.arange(columns) + window, columns)
    onset = dense & (total[:, ends] - total[:, :-1] >= sustained)
    first = np.argmax(onset, axis=1)
    column = np.take_along_axis(order, first[:, None], axis=1)[:, 0]
    return np.where(onset.any(axis=1), column, -1).astype(np.int64)


def early_median(values: Floats) -> Floats:
    """The median of each tensor's first observed columns, float64[T]; NaN without any."""
    return _median_of(values, late=False)


def log2_change(values: Floats, reference: Floats, statistic: str) -> Floats:
    """log2 of values, float64[T, C], over a reference of each tensor, float64[T].

    Rates below MIN_RATE count as MIN_RATE. Other statistics have no change where they are not
    positive.
    """
    if is_rate(statistic):
        values, reference = np.maximum(values, MIN_RATE), np.maximum(reference, MIN_RATE)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.log2(values) - np.log2(reference)[:, None]
    return np.where(np.isfinite(change), change, np.nan)


def _median_of(values: Floats, *, late: bool) -> Floats:
    observed = ~np.isnan(values)
    number = np.maximum(np.ceil(EARLY_SHARE * observed.sum(axis=1)), EARLY_COLUMNS)[:, None]
    counted = observed[:, ::-1].cumsum(axis=1)[:, ::-1] if late else observed.cumsum(axis=1)
    chosen = np.where(observed & (counted <= number), values, np.nan)
    # Sorting puts NaN last; numpy's nanmedian warns about rows without values.
    chosen.sort(axis=1)
    count = (~np.isnan(chosen)).sum(axis=1)
    low, high = np.maximum((count - 1) // 2, 0), count // 2
    if not chosen.shape[1]:
        return np.full(len(values), np.nan)
    rows = np.arange(len(chosen))
    upper = chosen[rows, np.minimum(high, chosen.shape[1] - 1)]
    return np.asarray((chosen[rows, low] + upper) / 2.0, np.float64)


def _largest(values: Floats) -> Floats:
    return np.asarray(np.fmax.reduce(values, axis=1, initial=np.nan), np.float64)
