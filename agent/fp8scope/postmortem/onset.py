"""The values of a run that moved first, and when: a description of kept steps, not a test.

A series has moved at the first step from which on it stays outside of the range that it had in its first
third: the median +- `FACTOR` times 1.4826 times the median absolute deviation (that factor makes it the
standard deviation of normal values). Values that are all positive are compared as logarithms, because amaxes
and norms change by factors, and the range is at least `MIN_FACTOR` wide. A rate has moved when it rises, by
`MIN_RATE` at least. A value that is not finite is outside.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope.recording.records import Row

FACTOR = 8.0
MIN_FACTOR = 0.05
MIN_RATE = 0.01
SHARE = 3
"""The first of so many parts is the reference."""
MIN_REFERENCE = 5
LASTING = 3
"""Steps that it must stay outside, or until the end if fewer are left."""
MAX_SIGNS = 40
RATES = ("saturated", "underflow", "nonfinite")
SCALARS = ("loss", "grad_norm", "grad_norm_applied", "learning_rate", "skipped_steps")

Float64s = NDArray[np.float64]


@dataclass(frozen=True)
class Sign:
    """A series that moved at `step`: from about `before` to `after`."""

    step: int
    name: str
    before: float
    after: float

    def sentence(self) -> str:
        return f"{self.name} went from {self.before:.4g} to {self.after:.4g}"


def moved_at(values: Float64s, *, is_rate: bool = False) -> int | None:
    """The index at which a series moved; None if it did not. `values`: float64 [steps]."""
    begin = len(values) // SHARE
    reference = values[:begin][np.isfinite(values[:begin])]
    if len(reference) < MIN_REFERENCE:
        return None
    finite = values[np.isfinite(values)]
    is_positive = not is_rate and finite.min() > 0
    if is_positive:
        values, reference = np.log(np.where(values > 0, values, np.nan)), np.log(reference)
    center = float(np.median(reference))
    spread = 1.4826 * float(np.median(np.abs(reference - center)))
    least = MIN_RATE if is_rate else MIN_FACTOR * (1.0 if is_positive else abs(center))
    limit = max(FACTOR * spread, least)
    outside = ~(values - center <= limit) if is_rate else ~(np.abs(values - center) <= limit)
    for index in np.flatnonzero(outside[begin:]) + begin:
        if outside[index : index + LASTING].all():
            return int(index)
    return None


def signs(rows: Sequence[Row], tensors: Sequence[str], statistics: Sequence[str]) -> list[Sign]:
    """The series that moved, in the order of their steps; at most MAX_SIGNS."""
    steps = [row.step for row in rows]
    moved = []
    for name, values in series_of(rows, tensors, statistics):
        observed = ~np.isnan(values) if name not in SCALARS else np.ones(len(values), bool)
        places = np.flatnonzero(observed)
        index = moved_at(values[observed], is_rate=name.endswith(" rate"))
        if index is not None:
            observed_values = values[observed]
            before = float(np.median(observed_values[: len(observed_values) // SHARE]))
            moved.append(Sign(steps[places[index]], name, before, float(observed_values[index])))
    return sorted(moved, key=lambda sign: sign.step)[:MAX_SIGNS]


def series_of(
    rows: Sequence[Row], tensors: Sequence[str], statistics: Sequence[str]
) -> Iterable[tuple[str, Float64s]]:
    """Scalars, and each tensor's amax and rates, float64 [rows] each; NaN where a step has no value."""
    for name in SCALARS:
        values = np.array([row.scalars.get(name, np.nan) for row in rows])
        if any(name in row.scalars for row in rows):
            yield name, values
    columns = {name: index for index, name in enumerate(statistics)}
    if "numel" not in columns:
        return
    cube = np.full((len(rows), len(tensors), len(statistics)), np.nan)
    for position, row in enumerate(rows):
        observed = row.statistics[:, columns["numel"]] > 0
        cube[position, : len(observed)][observed] = row.statistics[observed]
    for index, tensor in enumerate(tensors):
        if "amax" in columns:
            yield f"{tensor} amax", cube[:, index, columns["amax"]]
        for rate in RATES:
            if rate in columns:
                yield (
                    f"{tensor} {rate} rate",
                    cube[:, index, columns[rate]] / cube[:, index, columns["numel"]],
                )
