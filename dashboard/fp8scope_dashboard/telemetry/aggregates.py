"""Aggregate values over buckets of neighbouring steps. Pure functions of arrays.

The parts of a bucket, each float64[series, buckets], NaN if the bucket has no value:

| part | |
|---|---|
| `max`, `min` | the largest and the smallest value, including infinities but not NaN |
| `argmax`, `argmin` | the first step with that value, minus the first step of the bucket |
| `last`, `sum`, `count` | over the values that are not NaN; count is 0 if there are none |
| `undefined` | the first step with a value of NaN, minus the first step of the bucket; scalars only |

If a bucket has few values or a constant value, several parts are equal; those that `implied` computes need
not be stored. `max` with `argmax` gives real points at their real steps, so charts show no averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.telemetry.codec import Float64s, Int64s
from fp8scope_dashboard.telemetry.rank_merge import DERIVED

PARTS: Final = ("max", "min", "argmax", "argmin", "last", "sum", "count", "undefined")
Parts = dict[str, Float64s]
BLANK: Final = {part: 0.0 if part == "count" else np.nan for part in PARTS}
"""The parts of a bucket without values."""
IMPLIED_FROM: Final[Mapping[str, tuple[str, ...]]] = {
    "min": ("max",),
    "argmin": ("argmax",),
    "last": ("max",),
    "count": ("max",),
    "sum": ("max", "min", "count"),
}
"""The parts that `implied` can compute, in the order of computation, and what from."""

FINEST: Final = 64
FACTOR: Final = 8
STRIDES: Final = tuple(FINEST * FACTOR**level for level in range(5))


def aggregate(
    steps: Int64s, values: Float64s, stride: int, first: int, buckets: int, *, nan_is_value: bool = False
) -> Parts:
    """Aggregate float64[K, N] at increasing steps, int64[N], into the buckets first..first + buckets - 1.

    Bucket j holds the steps j * stride <= step < (j + 1) * stride. All steps must be in these buckets. NaN
    means no value, unless `nan_is_value`.
    """
    parts = blank(len(values), buckets)
    if not len(steps):
        return parts
    bucket = steps // stride - first
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    filled = bucket[starts]
    offsets = steps - (bucket + first) * stride
    segments = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(steps)))
    nan = np.isnan(values)
    has_value = ~nan
    count = np.add.reduceat(has_value, starts, axis=1, dtype=np.int64)
    some = count > 0
    parts["count"][:, filled] = count
    for name, extreme in (("max", np.fmax), ("min", np.fmin)):
        best = extreme.reduceat(values, starts, axis=1)
        parts[name][:, filled] = best
        at = _first(values == best[:, segments], offsets, starts, stride)
        parts[f"arg{name}"][:, filled] = np.where(some, at, np.nan)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN
        total = np.add.reduceat(np.where(nan, 0.0, values), starts, axis=1)
    parts["sum"][:, filled] = np.where(some, total, np.nan)
    positions = np.where(has_value, np.arange(len(steps), dtype=np.int32), np.int32(-1))
    newest = np.maximum.reduceat(positions, starts, axis=1)
    last = np.take_along_axis(values, np.maximum(newest, 0).astype(np.int64), axis=1)
    parts["last"][:, filled] = np.where(some, last, np.nan)
    if nan_is_value and nan.any():
        at = _first(nan, offsets, starts, stride)
        parts["undefined"][:, filled] = np.where(at < stride, at, np.nan)
    return parts


def combine(fine: Parts, stride: int) -> Parts:
    """Combine buckets of `stride` steps into buckets FACTOR times as long: [K, FACTOR * B] to [K, B]."""
    grouped = {name: array.reshape(len(array), -1, FACTOR) for name, array in fine.items()}
    shift = np.arange(FACTOR) * float(stride)
    count = grouped["count"].sum(axis=2)
    some = count > 0
    coarse = {"count": count}
    for name, extreme in (("max", np.fmax), ("min", np.fmin)):
        best = extreme.reduce(grouped[name], axis=2)
        same = grouped[name] == best[:, :, None]
        at = np.where(same, grouped[f"arg{name}"] + shift, np.inf).min(axis=2)
        coarse[name] = best
        coarse[f"arg{name}"] = np.where(some, at, np.nan)
    with np.errstate(invalid="ignore"):
        total = np.where(grouped["count"] > 0, grouped["sum"], 0.0).sum(axis=2)
    coarse["sum"] = np.where(some, total, np.nan)
    newest = FACTOR - 1 - np.argmax((grouped["count"] > 0)[:, :, ::-1], axis=2)
    last = np.take_along_axis(grouped["last"], newest[:, :, None], axis=2)[:, :, 0]
    coarse["last"] = np.where(some, last, np.nan)
    coarse["undefined"] = np.fmin.reduce(grouped["undefined"] + shift, axis=2)
    return coarse


def unite(stored: Parts, added: Parts) -> Parts:
    """Add the values of `added` to the buckets of `known`, each float64[K, B] by part.

    Used for rows that arrive after retention has deleted the raw values of their steps. Exact and idempotent
    for `max`, `min`, `argmax`, `argmin` and `undefined`. `last`, `sum` and `count` of a bucket that already
    has values stay as they are, because some of the added rows may be counted in them already.
    """
    result = {}
    for name, extreme in (("max", np.fmax), ("min", np.fmin)):
        best = extreme(stored[name], added[name])
        steps = [np.where(parts[name] == best, parts[f"arg{name}"], np.nan) for parts in (stored, added)]
        result[name], result[f"arg{name}"] = best, np.fmin(*steps)
    result["undefined"] = np.fmin(stored["undefined"], added["undefined"])
    has_values = stored["count"] > 0
    for name in ("last", "sum", "count"):
        result[name] = np.where(has_values, stored[name], added[name])
    return result


def blank(series: int, buckets: int) -> Parts:
    """Return the parts of empty buckets."""
    return {part: np.full((series, buckets), nothing) for part, nothing in BLANK.items()}


def implied(part: str, parts: Mapping[str, Float64s]) -> Float64s:
    """Compute a part of IMPLIED_FROM for buckets that have one value, or a constant value.

    `parts` has those that it is implied from, each float64[series, buckets]; so is the result.
    """
    if part == "count":
        return (~np.isnan(parts["max"])).astype(np.float64)
    if part == "sum":
        with np.errstate(invalid="ignore"):  # inf * 0
            total = parts["max"] * parts["count"]
        # The sum is known only for a constant value.
        return np.where(parts["max"] == parts["min"], total, np.nan)
    return parts[IMPLIED_FROM[part][0]]


def spare(parts: Parts) -> set[str]:
    """The parts that `implied` reproduces exactly, including the sign of zeros."""
    return {part for part in IMPLIED_FROM if _identical(implied(part, parts), parts[part])}


def with_stand_ins(parts: Iterable[str]) -> tuple[str, ...]:
    """These parts and the parts that they may be implied from, each once."""
    closure = dict.fromkeys(parts)
    for part in tuple(closure):
        closure |= dict.fromkeys(IMPLIED_FROM.get(part, ()))
    return tuple(closure)


def needed(statistic: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of the terms that `from_terms` needs to compute these parts of a statistic."""
    more = ("max", "min") if {"argmax", "argmin"} & set(parts) else ("max",)
    return tuple(dict.fromkeys((*parts, *more))) if statistic in DERIVED else parts


def from_terms(statistic: str, terms: Mapping[str, Mapping[str, Float64s]], part: str) -> Float64s:
    """Compute a part of a derived statistic from the parts of its terms, float64[K, B].

    Exact if, within each bucket, the denominator is constant and at most one term changes; `same_from_terms`
    checks this.
    """
    ratio = DERIVED[statistic]
    over = [terms[name] for name in ratio.over]
    under = terms[ratio.under]
    if part == "undefined":
        return np.full_like(under["max"], np.nan)
    if part == "count":
        return np.where(under["max"] > 0, under["count"], 0.0)
    if part.startswith("arg"):
        # A new array, because the caller may write to it.
        return np.where(under["max"] > 0, _changing(over, part), np.nan)
    divisor = under["last"] if part == "last" else under["max"]
    total = sum((term[part] for term in over), np.zeros_like(divisor))
    return np.divide(total, divisor, out=np.full_like(divisor, np.nan), where=divisor > 0)


def same_from_terms(statistic: str, terms: Mapping[str, Parts], direct: Parts) -> bool:
    """Return whether `from_terms` reproduces these parts, sums up to rounding: none need be stored."""
    for part in PARTS:
        computed = from_terms(statistic, terms, part)
        if part == "sum":
            same = np.allclose(computed, direct[part], rtol=1e-9, atol=0.0, equal_nan=True)
        else:
            same = np.array_equal(computed, direct[part], equal_nan=True)
        if not same:
            return False
    return True


def _changing(over: list[Mapping[str, Float64s]], part: str) -> Float64s:
    """The offset of the extreme, taken from the term that changes within the bucket."""
    offset = over[0][part]
    for term in over[1:]:
        offset = np.where(term["max"] != term["min"], term[part], offset)
    return offset


def _first(hit: NDArray[np.bool_], offsets: Int64s, starts: Int64s, stride: int) -> NDArray[np.int32]:
    """The smallest offset of a hit in each segment, `stride` if it has none."""
    return np.minimum.reduceat(np.where(hit, offsets.astype(np.int32), np.int32(stride)), starts, axis=1)


def _identical(a: Float64s, b: Float64s) -> bool:
    observed = ~np.isnan(b)
    return np.array_equal(a, b, equal_nan=True) and bool(
        (np.signbit(a[observed]) == np.signbit(b[observed])).all()
    )
