"""Several writers' rows of the same steps into one row a step. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.telemetry.codec import Float64s, Int64s

# What each rank counted of its own share of a tensor adds up; anything else is the largest of the ranks'.
SUMMED: Final = frozenset(
    {"numel", "saturated", "underflow", "subnormal", "nonfinite", "sq_error", "sq_signal"}
)


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
}


@dataclass(frozen=True)
class Part:
    """Rows of one writer.

    Attributes:
        rank: the writer's rank.
        order: the writer's place among all; of two that wrote the same step the smaller is believed.
        steps: int64[R].
        times: datetime64[us][R].
        values: float64[R] or float64[R, T] per name.
    """

    rank: int
    order: int
    steps: Int64s
    times: NDArray[np.datetime64]
    values: Mapping[str, Float64s]


@dataclass(frozen=True)
class Merged:
    """One row a step: steps int64[N] increasing, times datetime64[us][N], values float64[N(, T)] per name."""

    steps: Int64s
    times: NDArray[np.datetime64]
    values: Mapping[str, Float64s]


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
    joined = _Joined(parts)
    chosen = joined.choose(by_rank=False)
    return Merged(
        joined.steps[chosen], joined.times[chosen], {k: v[chosen] for k, v in joined.values.items()}
    )


def across_ranks(parts: Sequence[Part]) -> Merged:
    """All ranks' rows of each step as one: counts added, everything else the largest; NaN is 'not observed'.

    Within a rank, the row sent last by the writer of lowest order stands for the step.
    """
    joined = _Joined(parts)
    chosen = joined.choose(by_rank=True)
    steps = joined.steps[chosen]
    starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
    values = {name: array[chosen] for name, array in joined.values.items()}
    if len(starts) != len(steps):
        values = {name: _reduce(name, array, starts) for name, array in values.items()}
    return Merged(steps[starts], joined.times[chosen][starts], values)


class _Joined:
    """All parts' rows one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.steps = np.concatenate([part.steps for part in parts])
        self.times = np.concatenate([part.times for part in parts])
        names = parts[0].values.keys()
        self.values = {name: np.concatenate([part.values[name] for part in parts]) for name in names}
        lengths = [len(part.steps) for part in parts]
        self._rank = np.repeat([part.rank for part in parts], lengths)
        self._order = np.repeat([part.order for part in parts], lengths)

    def choose(self, *, by_rank: bool) -> Int64s:
        """Indices of the rows that count, by step (and rank)."""
        count = len(self.steps)
        if count < 2 or bool(np.all(np.diff(self.steps) > 0)):
            return np.arange(count)
        rank = self._rank if by_rank else np.zeros(count, np.int64)
        ranked = np.lexsort((-np.arange(count), self._order, rank, self.steps))
        steps, ranks = self.steps[ranked], rank[ranked]
        new = np.ones(count, bool)
        new[1:] = (np.diff(steps) != 0) | (np.diff(ranks) != 0)
        return ranked[new]


def _reduce(name: str, values: Float64s, starts: Int64s) -> Float64s:
    if name not in SUMMED:
        return np.fmax.reduceat(values, starts, axis=0)
    observed = np.logical_or.reduceat(~np.isnan(values), starts, axis=0)
    total = np.add.reduceat(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf), starts, axis=0)
    return np.where(observed, total, np.nan)
