"""Merge the rows of several writers into one row per step. Pure functions of arrays.

The last axis of value arrays is the rows: float64[R], or float64[T, R] for T series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.telemetry.codec import Float64s, Int64s

Times = NDArray[np.datetime64]

# Counts of the share of each rank add up. Of other statistics the largest value of the ranks counts, except
# for the smallest scale of the blocks of a tensor.
SUMMED: Final = frozenset(
    {"numel", "saturated", "underflow", "subnormal", "nonfinite", "blocks", "saturated_blocks"}
    | {"sq_error", "sq_signal"}
)
SMALLEST: Final = frozenset({"scale_min"})
# The scalar that adds up over the ranks, modulo a number below which float64 holds every integer.
DATA_HASH: Final = "data_hash"
DATA_HASH_MODULUS: Final = 1 << 53


@dataclass(frozen=True)
class Ratio:
    """A derived statistic: the sum of stored statistics over another one."""

    over: tuple[str, ...]
    under: str


# Computed after merging the ranks; docs/wire.md lists the stored statistics.
DERIVED: Final[Mapping[str, Ratio]] = {
    "saturation_rate": Ratio(("saturated",), "numel"),
    "underflow_rate": Ratio(("underflow",), "numel"),
    "subnormal_rate": Ratio(("subnormal",), "numel"),
    "nonfinite_rate": Ratio(("nonfinite",), "numel"),
    "overflow_rate": Ratio(("saturated", "nonfinite"), "numel"),
    "saturated_block_rate": Ratio(("saturated_blocks",), "blocks"),
    "noise_to_signal": Ratio(("sq_error",), "sq_signal"),
}


@dataclass(frozen=True)
class RankRows:
    """Rows of one writer, in sending order.

    Attributes:
        rank: the rank of the writer.
        order: position by authority; if two writers have the same step, the smaller order wins.
        steps: int64[R].
        times: datetime64[us][R].
        values: float64[R] or float64[T, R] per name.
    """

    rank: int
    order: int
    steps: Int64s
    times: Times
    values: Mapping[str, Float64s]


@dataclass(frozen=True)
class Merged:
    """One row per step: steps int64[N], increasing; times datetime64[us][N]; values float64[(T,) N]."""

    steps: Int64s
    times: Times
    values: Mapping[str, Float64s]

    def rows(self, chosen: slice | NDArray[np.bool_] | Int64s) -> Merged:
        """Select rows."""
        values = {name: array[..., chosen] for name, array in self.values.items()}
        return Merged(self.steps[chosen], self.times[chosen], values)


def sources(statistic: str) -> tuple[str, ...]:
    """The stored statistics that a statistic is computed from: itself, or the terms of a derived one."""
    ratio = DERIVED.get(statistic)
    return (*ratio.over, ratio.under) if ratio else (statistic,)


def derive(statistic: str, values: Mapping[str, Float64s]) -> Float64s:
    """Compute a statistic from its `sources`, float64 of one shape.

    NaN where a source is NaN or the denominator is 0.
    """
    ratio = DERIVED.get(statistic)
    if ratio is None:
        return values[statistic]
    under = values[ratio.under]
    over = sum((values[name] for name in ratio.over), np.zeros_like(under))
    return np.divide(over, under, out=np.full_like(under, np.nan), where=under > 0)


def first_of_each_step(parts: Sequence[RankRows]) -> Merged:
    """Choose one row per step: of the writer with the lowest order, the row sent last."""
    if len(parts) == 1 and _increasing(parts[0].steps):
        return Merged(parts[0].steps, parts[0].times, parts[0].values)
    steps = np.concatenate([part.steps for part in parts])
    times = np.concatenate([part.times for part in parts])
    values = {
        name: np.concatenate([part.values[name] for part in parts], axis=-1) for name in parts[0].values
    }
    joined = Merged(steps, times, values)
    if _increasing(steps):
        return joined
    order = np.repeat([part.order for part in parts], [len(part.steps) for part in parts])
    ranked = np.lexsort((-np.arange(len(steps)), order, steps))
    new = np.diff(steps[ranked], prepend=steps[ranked[0]] - 1) != 0
    return joined.rows(ranked[new])


def data_hash_across_ranks(parts: Iterable[RankRows]) -> Merged:
    """Add the ranks' hashes of their batches, at the steps that every rank has logged.

    A step is represented within a rank as in `first_of_each_step`. There must be a part.
    """
    by_rank = _by_rank(sorted(parts, key=attrgetter("rank")))
    ranks = [first_of_each_step(_observed(of_rank)) for of_rank in by_rank]
    finite = [rank.rows(np.isfinite(rank.values[DATA_HASH])) for rank in ranks]
    steps = finite[0].steps
    for other in finite[1:]:
        steps = np.intersect1d(steps, other.steps, assume_unique=True)
    aligned = [rank.rows(np.searchsorted(rank.steps, steps)) for rank in finite]
    total = np.zeros(len(steps), np.int64)
    for rank in aligned:
        total = (total + rank.values[DATA_HASH].astype(np.int64)) % DATA_HASH_MODULUS
    return Merged(steps, aligned[0].times, {DATA_HASH: total.astype(np.float64)})


def across_ranks(parts: Iterable[RankRows]) -> Merged | None:
    """Merge the rows of all ranks: add counts, take the largest of other statistics. NaN is not observed.

    Within a rank, a step is represented by the last row of the writer with the lowest order, among rows with
    any observation. `parts` must be grouped by rank; memory holds the rows of one rank and the result.
    Returns None if there are no parts.
    """
    merged: Merged | None = None
    for of_rank in _by_rank(parts):
        rows = first_of_each_step(_observed(of_rank))
        merged = rows if merged is None else _combine(merged, rows)
    return merged


def _by_rank(parts: Iterable[RankRows]) -> Iterable[list[RankRows]]:
    return (list(of_rank) for _, of_rank in groupby(parts, key=attrgetter("rank")))


def _observed(parts: list[RankRows]) -> list[RankRows]:
    """Drop rows without any observation if they could hide other rows of the same step."""
    joined = parts[0].steps if len(parts) == 1 else np.concatenate([part.steps for part in parts])
    if _increasing(joined):
        return parts
    return [_only_observed(part) for part in parts]


def _only_observed(part: RankRows) -> RankRows:
    seen = np.zeros(len(part.steps), bool)
    for array in part.values.values():
        observed = ~np.isnan(array)
        seen |= observed if array.ndim == 1 else observed.any(axis=0)
    values = {name: array[..., seen] for name, array in part.values.items()}
    return RankRows(part.rank, part.order, part.steps[seen], part.times[seen], values)


def _combine(low: Merged, high: Merged) -> Merged:
    """Merge the rows of two ranks; the time of a step is that of the lower rank."""
    if np.array_equal(low.steps, high.steps):
        values = {name: _add(name, array, high.values[name]) for name, array in low.values.items()}
        return Merged(low.steps, low.times, values)
    steps = np.union1d(low.steps, high.steps)
    below, above = np.searchsorted(steps, low.steps), np.searchsorted(steps, high.steps)
    times = np.empty(len(steps), "datetime64[us]")
    times[above] = high.times
    times[below] = low.times
    values = {}
    for name, array in low.values.items():
        spread = np.full((*array.shape[:-1], len(steps)), np.nan)
        spread[..., below] = array
        spread[..., above] = _add(name, spread[..., above], high.values[name])
        values[name] = spread
    return Merged(steps, times, values)


def _add(name: str, a: Float64s, b: Float64s) -> Float64s:
    if name in SMALLEST:
        return np.fmin(a, b)
    if name not in SUMMED:
        return np.fmax(a, b)
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, a + b))


def _increasing(steps: Int64s) -> bool:
    return bool((steps[1:] > steps[:-1]).all())
