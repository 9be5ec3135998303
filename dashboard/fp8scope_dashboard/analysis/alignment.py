"""Putting the loss curves of several runs on one axis.

Curves are aligned on tokens where every run carries them, else on steps, and only over the range that they
have in common. Where the runs logged at the same places (and saw the same data in the same order), what
the batches have in common cancels in the difference: it is paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.text.numbers import LARGEST

Axis = Literal["tokens", "steps"]
Floats = NDArray[np.float64]

# Shared places over those of the run with the fewest: from here on only shared places are used.
SHARED_FRACTION = 0.5


@dataclass(frozen=True)
class Curve:
    """One run's loss.

    Attributes:
        steps: int64[N], ascending, each step once.
        losses: float64[N]; NaN and infinities are values.
        tokens: float64[N], tokens seen at the end of each step, or None where the run does not log them.
    """

    steps: NDArray[np.int64]
    losses: Floats
    tokens: Floats | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def on(self, axis: Axis) -> Floats:
        """The curve's places on an axis, float64[N], strictly ascending for a curve made by `clean`."""
        if axis == "steps":
            return self.steps.astype(np.float64)
        if self.tokens is None:
            raise ValueError("This run logs no tokens: align on steps.")
        return self.tokens


@dataclass(frozen=True)
class Aligned:
    """Curves on one axis.

    Attributes:
        axis: what x counts.
        x: float64[M], ascending.
        losses: float64[R, M], one row per run, in the order given.
        paired: every value is the run's own at that place; else it is a mean over the stretch since the
            place before, because the runs logged at different places.
    """

    axis: Axis
    x: Floats
    losses: Floats
    paired: bool


def clean(curve: Curve) -> Curve:
    """Order a curve by step, keep the first visit of each step, and drop a token count that does not grow.

    Losses too large to be computed with (see `numbers`) become infinite.

    Token counts that are missing at some step, not finite or not strictly increasing cannot be an axis: then
    the whole column is dropped.
    """
    steps, first = np.unique(curve.steps, return_index=True)
    tokens = None if curve.tokens is None else curve.tokens[first]
    if tokens is not None and not (np.isfinite(tokens).all() and (np.diff(tokens) > 0).all()):
        tokens = None
    losses = curve.losses[first]
    return Curve(steps, np.where(np.abs(losses) > LARGEST, np.copysign(np.inf, losses), losses), tokens)


def choose_axis(curves: Sequence[Curve]) -> Axis:
    """Tokens where every run carries them (they survive a change of batch size), else steps."""
    return "tokens" if all(curve.tokens is not None for curve in curves) else "steps"


def align(curves: Sequence[Curve]) -> Aligned:
    """Align curves over their common range; x is empty where they have none.

    Raises:
        ValueError: no curve was given.
    """
    if not curves:
        raise ValueError("Nothing to align: give at least one curve.")
    axis = choose_axis(curves)
    places = [curve.on(axis) for curve in curves]
    if any(len(place) == 0 for place in places):
        return Aligned(axis, np.empty(0), np.empty((len(curves), 0)), paired=True)
    low = max(place[0] for place in places)
    high = min(place[-1] for place in places)
    inside = [(place >= low) & (place <= high) for place in places]
    places = [place[mask] for place, mask in zip(places, inside, strict=True)]
    losses = [curve.losses[mask] for curve, mask in zip(curves, inside, strict=True)]
    fewest = min(places, key=len)
    shared = places[0]
    for place in places[1:]:
        shared = np.intersect1d(shared, place, assume_unique=True)
    if len(shared) >= SHARED_FRACTION * len(fewest):
        rows = [loss[np.searchsorted(place, shared)] for place, loss in zip(places, losses, strict=True)]
        return Aligned(axis, shared, _stack(rows, len(shared)), paired=True)
    rows = [_bin_means(place, loss, fewest) for place, loss in zip(places, losses, strict=True)]
    return _without_empty(axis, fewest, _stack(rows, len(fewest)), places)


def _stack(rows: Sequence[Floats], width: int) -> Floats:
    return np.stack(rows) if width else np.empty((len(rows), 0))


def _bin_means(x: Floats, values: Floats, edges: Floats) -> Floats:
    """Mean of the values in each (edges[i-1], edges[i]], the first bin being closed; NaN for an empty one."""
    bins = np.searchsorted(edges, x, side="left").clip(max=len(edges) - 1)
    counts = np.bincount(bins, minlength=len(edges))
    with np.errstate(invalid="ignore"):
        return np.bincount(bins, weights=values, minlength=len(edges)) / np.where(counts, counts, np.nan)


def _without_empty(axis: Axis, edges: Floats, losses: Floats, places: Sequence[Floats]) -> Aligned:
    """Leave out the bins in which some run has no point; a NaN that a run logged stays."""
    filled = np.ones(len(edges), dtype=bool)
    for place in places:
        filled[np.setdiff1d(np.arange(len(edges)), np.searchsorted(edges, place, side="left"))] = False
    return Aligned(axis, edges[filled], losses[:, filled], paired=False)
