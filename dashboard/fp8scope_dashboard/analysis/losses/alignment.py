"""Align the loss curves of several runs on one axis.

Curves are aligned on tokens if every run logs them, else on steps, over their common range. If the runs
logged at the same points and saw the same data in the same order, the noise of the batches cancels in the
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import LARGEST

Axis = Literal["tokens", "steps"]
# 'data': the hashes of the batches are equal at all shared points; 'steps': the runs share points, and their
# data is unknown; 'no': other points, or other data at the same points.
Pairing = Literal["data", "steps", "no"]

# With at least this share of common points (of the run with the fewest points), only those are used.
SHARED_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """One run's loss.

    Attributes:
        steps: int64[N], ascending, each step once.
        losses: float64[N]; may hold NaN and infinities.
        tokens: float64[N], tokens seen at the end of each step, or None if the run does not log them.
        data_hash: float64[N], hash of the batch of each step (an exact integer; NaN where it is unknown), or
            None if the run does not log it.
        planned: the step at which the run's schedule ends: its planned steps, or the last step of a run that
            finished without a plan. None if unknown.
        name: of the run, for warnings.
    """

    steps: NDArray[np.int64]
    losses: Floats
    tokens: Floats | None = None
    data_hash: Floats | None = None
    planned: int | None = None
    name: str = ""

    def __len__(self) -> int:
        return len(self.steps)

    def label(self, index: int) -> str:
        """The run's name, or its number in a sequence."""
        return self.name or f"run {index + 1}"

    def on(self, axis: Axis) -> Floats:
        """The curve's x values on an axis, float64[N], strictly ascending for a curve made by `clean`.

        Raises ValueError for tokens that the run does not log.
        """
        if axis == "steps":
            return self.steps.astype(np.float64)
        if self.tokens is None:
            raise ValueError("The run logs no tokens: align on steps.")
        return self.tokens


@dataclass(frozen=True)
class Aligned:
    """Curves on one axis.

    Attributes:
        axis: the unit of x.
        x: float64[M], ascending.
        losses: float64[R, M], one row per run, in the order given.
        shared: True if each value is the run's loss at that point. False if it is a mean over the points
            since the previous x, because the runs logged at different points.
        paired: how far the noise of the batches cancels in a difference of two rows.
    """

    axis: Axis
    x: Floats
    losses: Floats
    shared: bool
    paired: Pairing


def clean(curve: LossCurve) -> LossCurve:
    """Sort a curve by step, keep the first visit of each step, and drop unusable token counts.

    Losses above `text.numbers.LARGEST` become infinite. Token counts that are not finite or not strictly
    increasing cannot be an axis: the whole column is dropped.
    """
    steps, first = np.unique(curve.steps, return_index=True)
    tokens = None if curve.tokens is None else curve.tokens[first]
    if tokens is not None and not (np.isfinite(tokens).all() and (np.diff(tokens) > 0).all()):
        tokens = None
    losses = curve.losses[first]
    return replace(
        curve,
        steps=steps,
        losses=np.where(np.abs(losses) > LARGEST, np.copysign(np.inf, losses), losses),
        tokens=tokens,
        data_hash=None if curve.data_hash is None else curve.data_hash[first],
    )


def choose_axis(curves: Sequence[LossCurve]) -> Axis:
    """Tokens if every run logs them (they stay comparable if the batch size changes), else steps."""
    return "tokens" if all(curve.tokens is not None for curve in curves) else "steps"


def align(curves: Sequence[LossCurve]) -> Aligned:
    """Align curves over their common range; x is empty if they have none.

    Raises:
        ValueError: if no curve is given.
    """
    if not curves:
        raise ValueError("Nothing to align: give at least one curve.")
    axis = choose_axis(curves)
    xs = [curve.on(axis) for curve in curves]
    if any(len(x) == 0 for x in xs):
        return Aligned(axis, np.empty(0), np.empty((len(curves), 0)), shared=True, paired="no")
    low = max(x[0] for x in xs)
    high = min(x[-1] for x in xs)
    inside = [(x >= low) & (x <= high) for x in xs]
    xs = [x[mask] for x, mask in zip(xs, inside, strict=True)]
    losses = [curve.losses[mask] for curve, mask in zip(curves, inside, strict=True)]
    fewest = min(xs, key=len)
    shared = xs[0]
    for x in xs[1:]:
        shared = np.intersect1d(shared, x, assume_unique=True)
    if len(shared) >= SHARED_FRACTION * len(fewest):
        at = [np.searchsorted(x, shared) for x in xs]
        rows = [loss[indices] for loss, indices in zip(losses, at, strict=True)]
        hashes = [
            None if curve.data_hash is None else curve.data_hash[mask][indices]
            for curve, mask, indices in zip(curves, inside, at, strict=True)
        ]
        return Aligned(axis, shared, _stack(rows, len(shared)), True, _pairing(hashes))
    rows = [_bin_means(x, loss, fewest) for x, loss in zip(xs, losses, strict=True)]
    return _without_empty_bins(axis, fewest, _stack(rows, len(fewest)), xs)


def _pairing(hashes: Sequence[Floats | None]) -> Pairing:
    """Return how runs are paired at shared points, from the hashes of their batches at these points."""
    with_hashes = [run_hashes for run_hashes in hashes if run_hashes is not None]
    if len(with_hashes) < len(hashes) or not len(with_hashes[0]):
        return "steps"
    logged = np.logical_not(np.isnan(with_hashes).any(axis=0))
    if not logged.any():
        return "steps"
    first = with_hashes[0][logged]
    return (
        "data" if all(np.array_equal(run_hashes[logged], first) for run_hashes in with_hashes[1:]) else "no"
    )


def _stack(rows: Sequence[Floats], width: int) -> Floats:
    return np.stack(rows) if width else np.empty((len(rows), 0))


def _bin_means(x: Floats, values: Floats, edges: Floats) -> Floats:
    """Mean of the values in each (edges[i-1], edges[i]]; NaN for an empty bin. The first bin is closed."""
    bins = np.searchsorted(edges, x, side="left").clip(max=len(edges) - 1)
    counts = np.bincount(bins, minlength=len(edges))
    with np.errstate(invalid="ignore"):
        return np.bincount(bins, weights=values, minlength=len(edges)) / np.where(counts, counts, np.nan)


def _without_empty_bins(axis: Axis, edges: Floats, losses: Floats, xs: Sequence[Floats]) -> Aligned:
    """Drop the bins in which some run has no point; a NaN that a run logged stays."""
    filled = np.ones(len(edges), dtype=bool)
    for x in xs:
        filled[np.setdiff1d(np.arange(len(edges)), np.searchsorted(edges, x, side="left"))] = False
    return Aligned(axis, edges[filled], losses[:, filled], shared=False, paired="no")
