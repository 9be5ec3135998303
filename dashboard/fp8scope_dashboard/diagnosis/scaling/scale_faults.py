"""A check that each scale follows its amax as the recipe says. Pure functions of one tensor's series.

A scale s implies the amax that it was made for, M 2^-margin / s. The recipe says which amax that must be: the
tensor's own (current), or the largest of the last calls (delayed). This is arithmetic, not statistics: a
working scale fits to the rounding of float32, whatever the training does. So a scale that is off names its
own fault:

* frozen: the scale stays exactly the same while the amax that it should follow moves;
* reset: the scale fits a history that begins at one step, and not the calls before it;
* offset: the scale is off by a constant factor, which is another margin than the recipe's;
* stale: the scale fits an amax of earlier steps (a lag), or changes only now and then, or fits nothing.

Block recipes and unknown libraries state no formula for the recorded scale, so that only `frozen` is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fp8scope_dashboard.diagnosis.tensors import LONG_HISTORY, Scaling
from fp8scope_dashboard.statistics.arrays import Floats

FaultKind = Literal["frozen", "reset", "offset", "stale"]

# In powers of two: 2 %, far above the rounding of float32, far below a factor that matters.
TOLERANCE: Final = 0.03
# Rows without which nothing is decided, and the shortest fault: two calls may differ by chance.
MIN_ROWS: Final = 16
SHORTEST: Final = 3
# Single fitting rows inside a fault are chance: an amax may return to an old value.
GAP: Final = 3
# A constant scale is frozen if the amax that it should follow has changed this often meanwhile.
CHANGES: Final = 4
# With a scale per block only the median is recorded, and a power of two may stay for long: the amax itself
# must have moved this far, in powers of two.
MOVED: Final = 0.5
MOVED_POWER_OF_TWO: Final = 2.0
LONGEST_LAG: Final = 256
# Longer than any usual history: an unknown recipe must have changed its scale by then.
LONG_STRETCH: Final = LONG_HISTORY + 64
# Calls per step from which the history of a step is not known to the call.
SEVERAL: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class ScaleFault:
    """A scale that does not follow its amax.

    Attributes:
        first, last: positions of the rows between which it is off; `lasts` if that is the end of the window.
        bits: log2 of the amax that the scale was made for over the amax that it should be made for: positive
            if the scale is too small, so that values flush to zero, negative if values saturate. The value
            that is furthest from 0.
        lag: rows by which a stale scale lags; 0 if it is not a lag.
        every: rows between two updates of a stale scale; 0 if it changes in every row.
    """

    kind: FaultKind
    first: int
    last: int
    lasts: bool
    bits: float
    lag: int = 0
    every: int = 0


def scale_fault(
    amax: Floats, scale: Floats, largest: float, scaling: Scaling, *, begins: bool = True, calls: float = 1.0
) -> ScaleFault | None:
    """The longest fault of one tensor's scale; None if it follows, or if nothing can be decided.

    Args:
        amax, scale: float64[n]; rows in which the tensor was not observed are NaN.
        largest: M.
        begins: whether no history precedes the first row.
        calls: quantisations per row. Rows have the largest amax and the last scale of their calls, so that
            with several calls the formula does not hold exactly, and only `frozen` is decided.
    """
    observed = np.flatnonzero(np.isfinite(amax) & np.isfinite(scale) & (scale > 0))
    if len(observed) < MIN_ROWS or not np.isfinite(largest):
        return None
    a, s = amax[observed], scale[observed]
    if scaling.kind in ("blocks", "unknown") or calls > SEVERAL:
        fault = _frozen_by_constancy(a, s, largest, scaling)
    else:
        fault = _off_formula(a, s, largest, scaling, begins)
    if fault is None:
        return None
    return replace(fault, first=int(observed[fault.first]), last=int(observed[fault.last]))


def implied_amax(scale: Floats, largest: float, scaling: Scaling) -> Floats:
    """The amax that each scale was made for: M 2^-margin / s, float64[n]; `largest` is M."""
    with np.errstate(divide="ignore", invalid="ignore"):
        implied: Floats = largest * 2.0**-scaling.margin / scale
    return implied


def expected_amax(amax: Floats, scaling: Scaling, *, begins: bool) -> Floats:
    """The amax that the scale of each row should be made for, float64[n].

    NaN where the history is unknown or zero. `begins`: whether no history precedes the first row.
    """
    if scaling.kind == "current":
        expected = amax.astype(np.float64, copy=True)
    else:
        length = 1 if scaling.most_recent else scaling.history
        expected = np.full(len(amax), np.nan)
        expected[1:] = _largest_of_last(amax[:-1], length)
        if begins:
            # The first call has no history and takes its own amax.
            expected[:1] = amax[:1]
        else:
            expected[:length] = np.nan
    expected[expected <= 0] = np.nan
    return expected


def _expected_without_zeros(amax: Floats, scaling: Scaling, *, begins: bool) -> Floats:
    """`expected_amax` of a delayed scale whose history tensors of zeros do not enter."""
    length = 1 if scaling.most_recent else scaling.history
    counted = amax > 0
    before: NDArray[np.int64] = np.cumsum(counted) - counted
    expected = amax.astype(np.float64, copy=True) if begins else np.full(len(amax), np.nan)
    has_past = np.asarray(before >= (1 if begins else length))
    if has_past.any():
        expected[has_past] = _largest_of_last(amax[counted], length)[before[has_past] - 1]
    expected[expected <= 0] = np.nan
    return expected


def _largest_of_last(values: Floats, length: int) -> Floats:
    """The largest of each value and the length - 1 before it."""
    padded = np.concatenate([np.zeros(length - 1), values])
    largest: Floats = sliding_window_view(padded, length).max(axis=1)
    return largest


def deviation(amax: Floats, scale: Floats, largest: float, scaling: Scaling, *, begins: bool) -> Floats:
    """log2 of implied over expected amax, float64[n]: 0 where the scale follows, NaN where that is unknown.

    `amax` and `scale` are float64[n], one entry a row; `largest` is M; `begins` as in `expected_amax`.
    """
    bits = _bits_off(expected_amax(amax, scaling, begins=begins), scale, largest, scaling)
    if scaling.kind == "delayed" and bool((amax == 0).any()):
        # Layers of version 0.1 let zeros into the history. A scale follows if it follows either rule.
        skipping = _bits_off(_expected_without_zeros(amax, scaling, begins=begins), scale, largest, scaling)
        bits = np.where(np.abs(bits) <= np.abs(skipping), bits, skipping)
    return np.where(np.isfinite(bits), bits, np.nan)


def _bits_off(expected: Floats, scale: Floats, largest: float, scaling: Scaling) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        bits: Floats = np.log2(implied_amax(scale, largest, scaling)) - np.log2(expected)
    if scaling.power_of_two:
        # Rounded down to a power of two: up to one too small.
        bits = np.where((bits > 0) & (bits < 1.0), 0.0, np.where(bits >= 1.0, bits - 1.0, bits))
    return bits


def _off_formula(a: Floats, s: Floats, largest: float, scaling: Scaling, begins: bool) -> ScaleFault | None:
    bits = deviation(a, s, largest, scaling, begins=begins)
    off = np.abs(np.nan_to_num(bits)) > TOLERANCE
    first, last = _longest_run(off)
    if last - first + 1 < SHORTEST:
        return None
    here = bits[first : last + 1]
    here = here[np.isfinite(here)]
    if not len(here):
        return None
    worst = float(here[np.argmax(np.abs(here))])
    lasts = last >= len(a) - 1 - GAP
    frozen = _constant_run(a, s, first, last, scaling, begins)
    if frozen is not None:
        begin, end = frozen
        return ScaleFault(kind="frozen", first=begin, last=end, lasts=end >= len(a) - 1, bits=worst)
    if float(here.max() - here.min()) <= 2.0 * TOLERANCE:
        return ScaleFault(kind="offset", first=first, last=last, lasts=lasts, bits=float(np.median(here)))
    if scaling.kind == "delayed" and _is_reset(a, s, largest, scaling, first, last):
        return ScaleFault(kind="reset", first=first, last=last, lasts=lasts, bits=worst)
    lag = _lag(a, s, largest, scaling, first, last, begins)
    return ScaleFault(
        kind="stale",
        first=first,
        last=last,
        lasts=lasts,
        bits=worst,
        lag=lag,
        every=0 if lag else _every(s, first, last),
    )


def _constant_run(
    a: Floats, s: Floats, first: int, last: int, scaling: Scaling, begins: bool
) -> tuple[int, int] | None:
    """The constant stretch of the scale that makes up a fault; None if the scale changes in between."""
    middle = (first + last) // 2
    begin, end = _stretch(s, middle)
    if end - begin + 1 < 0.8 * (last - first + 1):
        return None
    expected = expected_amax(a, scaling, begins=begins)[begin : end + 1]
    expected = expected[np.isfinite(expected)]
    moves = np.abs(np.diff(np.log2(expected))) > 1e-6
    return (begin, end) if int(moves.sum()) >= CHANGES else None


def _stretch(s: Floats, at: int) -> tuple[int, int]:
    """The first and last of the rows around `at` with exactly its scale."""
    other = np.flatnonzero(s != s[at])
    before, after = other[other < at], other[other > at]
    return int(before[-1] + 1 if len(before) else 0), int(after[0] - 1 if len(after) else len(s) - 1)


def _is_reset(a: Floats, s: Floats, largest: float, scaling: Scaling, first: int, last: int) -> bool:
    """Return whether the scales fit a history that begins just before the fault, which ends as it fills."""
    if last - first > scaling.history + GAP:
        return False
    implied = implied_amax(s, largest, scaling)
    for start in range(max(0, first - 2), first + 1):
        rows = np.arange(max(first, start + 1), last + 1)
        history = np.maximum.accumulate(a[start:last])[rows - start - 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.abs(np.log2(implied[rows]) - np.log2(history)) <= TOLERANCE
        if len(rows) >= SHORTEST - 1 and fits.mean() >= 0.9:
            return True
    return False


def _lag(a: Floats, s: Floats, largest: float, scaling: Scaling, first: int, last: int, begins: bool) -> int:
    """The number of rows by which the scale lags; 0 if no lag explains it."""
    expected = expected_amax(a, scaling, begins=begins)
    implied = implied_amax(s, largest, scaling)
    rows = np.arange(first, last + 1)
    best, share = 0, 0.8
    for lag in range(1, min(LONGEST_LAG, last) + 1):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.abs(np.log2(implied[rows[rows >= lag]]) - np.log2(expected[rows[rows >= lag] - lag]))
        if len(ratios) < max(SHORTEST, len(rows) // 2):
            break
        fits = float((ratios <= TOLERANCE).mean())
        if fits > share:
            best, share = lag, fits
    return best


def _every(s: Floats, first: int, last: int) -> int:
    """Rows between two updates of a scale that stays constant in between; 0 if it changes all the time."""
    updates = np.flatnonzero(np.diff(s[first : last + 1]) != 0)
    if not len(updates):
        return 0
    every = (last - first + 1) / (len(updates) + 1)
    return round(every) if every >= 3 else 0


def _frozen_by_constancy(a: Floats, s: Floats, largest: float, scaling: Scaling) -> ScaleFault | None:
    """A scale without a formula is frozen if it stays for long while its tensor leaves it behind."""
    changes = np.flatnonzero(np.diff(s) != 0)
    edges = np.concatenate([[0], changes + 1, [len(s)]])
    longest = int(np.argmax(np.diff(edges)))
    begin, end = int(edges[longest]), int(edges[longest + 1]) - 1
    others = np.delete(np.diff(edges), longest)
    usual = int(others.max()) if len(others) else 0
    if end - begin + 1 < max(MIN_ROWS, 4 * usual):
        return None
    here = a[begin : end + 1]
    here = here[here > 0]
    if len(here) < MIN_ROWS:
        return None
    smooth = np.log2(np.array([np.median(part) for part in np.array_split(here, max(2, len(here) // 5))]))
    if scaling.kind == "unknown":
        # A history of any length holds the last amax: a larger one must have changed the scale at once.
        exceeds = here > 1.05 * largest / s[begin]
        moved = int(exceeds[:-1].sum()) >= CHANGES or len(here) > LONG_STRETCH
        moved = moved and float(np.ptp(smooth)) > TOLERANCE
    else:
        least = MOVED_POWER_OF_TWO if scaling.power_of_two else MOVED
        moved = float(np.ptp(smooth)) > least or (
            not scaling.power_of_two and usual <= 2 and len(np.unique(here)) > CHANGES
        )
    if not moved:
        return None
    shift = smooth[0] - smooth
    return ScaleFault(
        kind="frozen",
        first=begin,
        last=end,
        lasts=end == len(s) - 1,
        bits=float(shift[np.argmax(np.abs(shift))]),
    )


def _longest_run(marked: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """The first and last position of the longest run, with gaps of at most GAP; (0, -1) if there is none."""
    positions = np.flatnonzero(marked)
    if not len(positions):
        return 0, -1
    groups = np.split(positions, np.flatnonzero(np.diff(positions) > GAP + 1) + 1)
    # By the number of marked rows, not by extent: rows that fit by chance do not count.
    longest = max(groups, key=len)
    return (int(longest[0]), int(longest[-1])) if len(longest) >= SHORTEST else (0, -1)
