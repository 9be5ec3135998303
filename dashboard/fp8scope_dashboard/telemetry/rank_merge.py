"""Several writers' rows of the same steps into one row a step. Pure functions of arrays.

Arrays of values have the rows along their last axis: float64[R], or float64[T, R] for T series.
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

# What each rank counted of its own share of a tensor adds up; anything else is the largest of the ranks', but
# for the smallest scale of a tensor's blocks.
SUMMED: Final = frozenset(
    {"numel", "saturated", "underflow", "subnormal", "nonfinite", "blocks", "saturated_blocks"}
    | {"sq_error", "sq_signal"}
)
SMALLEST: Final = frozenset({"scale_min"})


@dataclass(frozen=True)
class Ratio:
    """A statistic that is a sum of stored ones over another."""

    over: tuple[str, ...]
    under: str


# docs/wire.md names what is stored; these are computed after the ranks are merged.
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
class Part:
    """Rows of one writer, in the order in which they were sent.

    Attributes:
        rank: the writer's rank.
        order: the writer's place among all; of two that wrote the same step the smaller is believed.
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
    """One row a step: steps int64[N] increasing, times datetime64[us][N], values float64[(T,) N] per name."""

    steps: Int64s
    times: Times
    values: Mapping[str, Float64s]

    def rows(self, chosen: slice | NDArray[np.bool_] | Int64s) -> Merged:
        """Some of the rows."""
        values = {name: array[..., chosen] for name, array in self.values.items()}
        return Merged(self.steps[chosen], self.times[chosen], values)


def sources(statistic: str) -> tuple[str, ...]:
    """The stored statistics that a statistic is computed from: itself, or a derived one's terms."""
    ratio = DERIVED.get(statistic)
    return (*ratio.over, ratio.under) if ratio else (statistic,)


def derive(statistic: str, values: Mapping[str, Float64s]) -> Float64s:
    """The statistic from its sources; NaN where a source is missing or nothing was counted."""
    ratio = DERIVED.get(statistic)
    if ratio is None:
        return values[statistic]
    under = values[ratio.under]
    over = sum((values[name] for name in ratio.over), np.zeros_like(under))
    return np.divide(over, under, out=np.full_like(under, np.nan), where=under > 0)


def first_of_each_step(parts: Sequence[Part]) -> Merged:
    """One writer's row for each step: the lowest order's, and of its rows the one sent last."""
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


def across_ranks(parts: Iterable[Part]) -> Merged | None:
    """All ranks' rows of each step as one: counts added, of anything else the largest; NaN is 'not observed'.

    Within a rank, the row sent last by the writer of lowest order stands for the step, among those rows in
    which anything was observed. `parts` come rank by rank; what is held in memory is one rank's rows beside
    the result. None when there are no parts.
    """
    merged: Merged | None = None
    for same in _by_rank(parts):
        one = first_of_each_step(_observed(same))
        merged = one if merged is None else _combine(merged, one)
    return merged


def _by_rank(parts: Iterable[Part]) -> Iterable[list[Part]]:
    return (list(same) for _, same in groupby(parts, key=attrgetter("rank")))


def _observed(parts: list[Part]) -> list[Part]:
    """Without the rows in which nothing was observed, where these could hide others of the same step."""
    joined = parts[0].steps if len(parts) == 1 else np.concatenate([part.steps for part in parts])
    if _increasing(joined):
        return parts
    return [_only_observed(part) for part in parts]


def _only_observed(part: Part) -> Part:
    seen = np.zeros(len(part.steps), bool)
    for array in part.values.values():
        there = ~np.isnan(array)
        seen |= there if array.ndim == 1 else there.any(axis=0)
    values = {name: array[..., seen] for name, array in part.values.items()}
    return Part(part.rank, part.order, part.steps[seen], part.times[seen], values)


def _combine(low: Merged, high: Merged) -> Merged:
    """Two ranks' rows as one; the time of a step is the lower rank's."""
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


def _add(name: str, one: Float64s, other: Float64s) -> Float64s:
    if name in SMALLEST:
        return np.fmin(one, other)
    if name not in SUMMED:
        return np.fmax(one, other)
    return np.where(np.isnan(one), other, np.where(np.isnan(other), one, one + other))


def _increasing(steps: Int64s) -> bool:
    return bool((steps[1:] > steps[:-1]).all())
