"""A loss scale that differs from BF16's, or jumps: one factor on the gradients of all layers. Pure functions.

A loss scale multiplies every `grad_output` by the same power of two, and no input and no weight. So the log2
of the ratio of amaxes (FP8 over BF16 at the same step, or after over before) is the same number for all
gradients and about 0 for the other tensors. Nothing else does that: a diverging training changes all roles,
and changes layers differently; one layer with wrong weights may divide the gradients of all others, but then
its weights differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.diagnosis.tensors import TensorSeries
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.robust import MAD_TO_SIGMA

# In powers of two. A factor of 8 between the arms' gradients is beyond the noise of one step; the layers of
# one model agree within a factor of 2, and so do other tensors.
MIN_FACTOR: Final = 3.0
SPREAD: Final = 1.0
# Gradients and rows without which nothing is decided.
MIN_TENSORS: Final = 3
MIN_ROWS: Final = 8


@dataclass(frozen=True)
class CommonFactor:
    """All gradients are multiplied by 2^bits from `onset` on; `against` says in comparison with what.

    `jumps`: the factor appears from one step to the next, within the run. A loss scaler changes its scale by
    factors of 2 only.
    """

    bits: float
    onset: int
    against: str
    jumps: bool = False


def common_factor(rows: TensorSeries, reference: TensorSeries | None) -> CommonFactor | None:
    """The common factor of the gradients against BF16, or else against the steps before a jump."""
    against_bf16 = None if reference is None else _against(rows, reference)
    return against_bf16 or (_jump(rows) if reference is None else None)


def _against(rows: TensorSeries, reference: TensorSeries) -> CommonFactor | None:
    ratios, steps = amax_ratios(rows, reference)
    if not len(steps):
        return None
    bits, common = _common(ratios, rows.roles == "grad_output")
    marked = common & (np.abs(bits) >= MIN_FACTOR)
    runs = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    lengths = runs[:, 1] - runs[:, 0]
    if not len(runs) or lengths.max() < min(MIN_ROWS, len(steps)):
        return None
    begin, end = runs[int(np.argmax(lengths >= min(MIN_ROWS, len(steps))))]
    if _differs(ratios[rows.roles == "weight", begin]):
        return None
    before = bits[max(0, begin - 1 - MIN_ROWS) : max(0, begin - 1)]
    jumps = len(before) >= MIN_ROWS // 2 and float(np.median(np.abs(before))) <= SPREAD
    return CommonFactor(float(np.median(bits[begin:end])), int(steps[begin]), "BF16", jumps)


def amax_ratios(
    rows: TensorSeries, reference: TensorSeries
) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """log2 of the amaxes over the reference's at the steps of both: float64[T, n], and the steps."""
    steps, ours, theirs = np.intersect1d(rows.steps, reference.steps, return_indices=True)
    names = {tensor.name: position for position, tensor in enumerate(reference.tensors)}
    ratios = np.full((len(rows.tensors), len(steps)), np.nan)
    for position, tensor in enumerate(rows.tensors):
        other = names.get(tensor.name)
        if other is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.log2(rows.amax[position, ours]) - np.log2(reference.amax[other, theirs])
            ratios[position] = np.where(np.isfinite(ratio), ratio, np.nan)
    seen = ~np.isnan(ratios).all(axis=0)
    return ratios[:, seen], steps[seen]


def _jump(rows: TensorSeries) -> CommonFactor | None:
    """A jump within the run: the level after against the level before."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log2(rows.amax)
    logarithms = np.where(np.isfinite(logarithms), logarithms, np.nan)
    gradients = rows.roles == "grad_output"
    if logarithms.shape[1] < 2 * MIN_ROWS or not gradients.any():
        return None
    # Single rows are noisy: the levels decide.
    bits = np.nan_to_num(_medians(np.diff(logarithms, axis=1)[gradients], 0))
    for at in np.flatnonzero(np.abs(bits) >= MIN_FACTOR - SPREAD) + 1:
        before, after = logarithms[:, max(0, at - MIN_ROWS) : at], logarithms[:, at : at + MIN_ROWS]
        if min(before.shape[1], after.shape[1]) < MIN_ROWS // 2:
            continue
        levels = _medians(after, 1) - _medians(before, 1)
        lasting, agrees = _common(levels[:, None], gradients)
        is_factor = agrees[0] and abs(lasting[0]) >= MIN_FACTOR
        if is_factor and not _differs(levels[rows.roles == "weight"]):
            return CommonFactor(float(lasting[0]), int(rows.steps[at]), "the steps before", True)
    return None


def _common(
    values: Floats, gradients: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """By column: the median of the gradients, and whether they agree and the others are about 0."""
    chosen = values[gradients]
    median = _medians(chosen, 0)
    spread = MAD_TO_SIGMA * _medians(np.abs(chosen - median), 0)
    others = np.nan_to_num(_medians(values[~gradients], 0))
    enough = (~np.isnan(chosen)).sum(axis=0) >= MIN_TENSORS
    with np.errstate(invalid="ignore"):
        agree = enough & (spread <= SPREAD) & (np.abs(others) <= SPREAD)
    return np.nan_to_num(median), agree


def _differs(bits: Floats) -> bool:
    """Return whether one of these tensors differs by a factor that no loss scale gives it."""
    return bool((np.abs(bits[np.isfinite(bits)]) >= MIN_FACTOR).any())


def _medians(values: Floats, axis: int) -> Floats:
    """Medians without NaN; NaN where there is no value."""
    if not values.size or not values.shape[axis]:
        return np.full(values.shape[1 - axis], np.nan)
    empty = np.isnan(values).all(axis=axis)
    medians: Floats = np.nanmedian(np.where(np.expand_dims(empty, axis), 0.0, values), axis=axis)
    return np.where(empty, np.nan, medians)
