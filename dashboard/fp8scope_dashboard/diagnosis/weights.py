"""Step: the optimizer. Weights that leap before the loss does, a broken state, and growth. Pure functions.

A working optimizer moves the largest element of a weight by well under one per cent in a step. If most
weights leap in the same step, their updates are wrong: the state of the optimizer, or the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding
from fp8scope_dashboard.diagnosis.precedence import SLACK, RunTrouble
from fp8scope_dashboard.diagnosis.tensors import Int64s, TensorSeries
from fp8scope_dashboard.statistics.arrays import Floats

# In powers of two, and in times of the usual change of a step: what most weights do not do by themselves.
MIN_LEAP: Final = 0.05
LEAP: Final = 8.0
MIN_WEIGHTS: Final = 4
# Growth in so many successive rows, each by at most a quarter, is no leap.
GROWING_ROWS: Final = 8
MAX_RATE: Final = 0.32
MIN_ROWS: Final = 16
# Powers of two by which the moments change between two sampled steps, beyond what gradients explain.
MOMENTS_JUMP: Final = 3.0
# Growth of the weights up to the trouble, in powers of two, beyond that of BF16.
GROWTH: Final = 2.0


@dataclass(frozen=True)
class Moments:
    """Largest elements of an optimizer's state in C columns of steps.

    Attributes:
        steps: int64[C + 1], the edges of the columns.
        bits: float64[C], the median over the moments of log2 of their amax; NaN where not sampled.
        gradients: float64[C], the same of the weights' gradients.
    """

    steps: Int64s
    bits: Floats
    gradients: Floats


def examine(
    rows: TensorSeries | None, reference: TensorSeries | None, moments: Moments | None, trouble: RunTrouble
) -> Finding:
    """The finding of this step."""
    looked = []
    leap = None if rows is None else leap_of(rows)
    if rows is not None and (rows.roles == "weight").any():
        looked.append(f"{int((rows.roles == 'weight').sum())} weights")
    jump = None if moments is None else _moments_jump(moments)
    if moments is not None and np.isfinite(moments.bits).any():
        looked.append(f"the optimizer's state in {int(np.isfinite(moments.bits).sum())} samples")
    if not looked:
        return Finding(
            step="optimizer",
            outcome="unknown",
            sentence="Neither weights nor the optimizer's state were observed.",
        )
    first = trouble.episodes[0].certain_from if trouble.episodes else None
    if rows is not None and leap is not None and (first is None or leap[0] <= first + SLACK):
        rate = _growth_after(rows, leap[0])
        return _leaps(rows, *leap) if rate is None else _grows(rows, leap[0], rate)
    if jump is not None and (first is None or jump[0] <= first + SLACK):
        low, high, bits = jump
        between = f"between the steps {low:,} and {high:,}"
        sentence = (
            f"The optimizer's state is broken: its moments change by a factor of 2^{bits:.0f} {between}, and "
            "the gradients do not."
        )
        return Finding(
            step="optimizer",
            outcome="cause",
            sentence=sentence,
            cause="optimizer_state",
            onset=high,
            tensors=(),
            suggestion=_ADVICE,
            earliest=low,
        )
    growth = None if rows is None or first is None else _growth(rows, reference, first)
    if growth is not None and growth >= GROWTH:
        sentence = f"The weights grow {2.0**growth:.0f}-fold up to the trouble at step {first:,}."
        return Finding(
            step="optimizer",
            outcome="suspect",
            sentence=sentence,
            cause="weight_growth",
            onset=None,
            tensors=(),
            suggestion="Lower the learning rate, or raise the weight decay.",
        )
    return Finding(
        step="optimizer",
        outcome="clear",
        sentence=f"No weight or moment leaps before a trouble ({' and '.join(looked)}).",
    )


_ADVICE: Final = (
    "Check what loads or changes the optimizer's state at this step, and continue from a checkpoint before "
    "it."
)


def leap_of(rows: TensorSeries) -> tuple[int, float] | None:
    """The first step in which most weights leap, and the median leap in powers of two; None without one."""
    amax = rows.amax[rows.roles == "weight"]
    observed = np.isfinite(amax).sum(axis=1) > 0.9 * amax.shape[1]
    if int(observed.sum()) < MIN_WEIGHTS or amax.shape[1] < MIN_ROWS:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = np.abs(np.diff(np.log2(amax[observed]), axis=1))
    changes = np.nan_to_num(changes, nan=0.0, posinf=0.0, neginf=0.0)
    median = np.median(changes, axis=0)
    for i in range(MIN_ROWS, len(median)):
        usual = np.quantile(median[:i], 0.9)
        if median[i] > max(MIN_LEAP, LEAP * usual):
            return int(rows.steps[i + 1]), float(median[i])
    return None


def _growth_after(rows: TensorSeries, step: int) -> float | None:
    """Powers of two by which most weights grow in each step from this one on; None if it was a leap.

    A broken state leaps by far, and the next steps are unlike the first.
    """
    at = int(np.searchsorted(rows.steps, step))
    if at + GROWING_ROWS > len(rows.steps):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        amax = np.log2(rows.amax[rows.roles == "weight"][:, at - 1 : at + GROWING_ROWS])
    medians = np.median(np.nan_to_num(np.diff(amax, axis=1), posinf=0.0, neginf=0.0), axis=0)
    rate, least = float(np.median(medians)), float(medians.min())
    return rate if 0.0 < rate <= MAX_RATE and least >= 0.5 * rate and medians.max() <= 2.0 * rate else None


def _grows(rows: TensorSeries, step: int, rate: float) -> Finding:
    names = tuple(tensor.name for tensor in rows.tensors if tensor.role == "weight")[:3]
    sentence = (
        f"The weights grow by {100.0 * (2.0**rate - 1.0):.0f} % in each step from step {step:,} on, and the "
        "optimizer does not shrink them."
    )
    advice = "Check what changes the weights from this step on, and lower the learning rate."
    return Finding(
        step="optimizer",
        outcome="cause",
        sentence=sentence,
        cause="weight_growth",
        onset=step,
        tensors=names,
        suggestion=advice,
    )


def _leaps(rows: TensorSeries, step: int, bits: float) -> Finding:
    weights = np.flatnonzero(rows.roles == "weight")
    names = tuple(rows.tensors[position].name for position in weights[:3].tolist())
    sentence = (
        f"The weights leap at step {step:,}: the largest element of half of {len(weights)} weights changes "
        "by "
        f"{100.0 * (2.0**bits - 1.0):.0f} % in one step, so that the optimizer's state is broken, or its "
        "learning rate is."
    )
    links = tuple(EvidenceLink("tensor", name, {"tensor": name, "statistic": "amax"}) for name in names)
    return Finding(
        step="optimizer",
        outcome="cause",
        sentence=sentence,
        cause="optimizer_state",
        onset=step,
        tensors=names,
        suggestion=_ADVICE,
        links=links,
    )


def _moments_jump(moments: Moments) -> tuple[int, int, float] | None:
    """The steps between which the moments jump, and by how many powers of two; None if they do not."""
    sampled = np.flatnonzero(np.isfinite(moments.bits))
    for before, after in zip(sampled[2:], sampled[3:], strict=False):
        bits = float(moments.bits[after] - moments.bits[before])
        explained = 2.0 * abs(float(moments.gradients[after] - moments.gradients[before]))
        if np.isfinite(explained) and abs(bits) - explained > MOMENTS_JUMP:
            return int(moments.steps[before]) + 1, int(moments.steps[after]), bits
    return None


def _growth(rows: TensorSeries, reference: TensorSeries | None, until: int) -> float | None:
    """log2 of the median growth of the weights up to a step, beyond that of BF16."""
    ours = _grown(rows, until)
    theirs = None if reference is None else _grown(reference, until)
    return None if ours is None else ours - max(theirs or 0.0, 0.0)


def _grown(rows: TensorSeries, until: int) -> float | None:
    amax = rows.amax[rows.roles == "weight"][:, rows.steps < until]
    if not rows.begins or amax.shape[0] < MIN_WEIGHTS or amax.shape[1] < MIN_ROWS:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.log2(amax[:, -1]) - np.log2(amax[:, 0])
    growth = growth[np.isfinite(growth)]
    return float(np.median(growth)) if len(growth) else None
