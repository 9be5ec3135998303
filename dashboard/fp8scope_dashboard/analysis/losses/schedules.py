"""A check that the learning-rate schedules of two arms end at the same point, and a comparison if not.

At the same step of two schedules of different lengths the learning rates differ, and so do the losses, in any
precision. Such runs are compared by their finals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8scope_dashboard.analysis.losses.alignment import Axis, LossCurve
from fp8scope_dashboard.analysis.losses.noise import Sums, newey_west_lags, prewhitened

# Schedules whose lengths differ by less count as equal.
SLACK = 0.01
MIN_FINALS = 20


@dataclass(frozen=True)
class Schedules:
    """The relation of a run's schedule to those of its baselines.

    Attributes:
        same: indices of the baselines whose schedule has (nearly) the run's length, or an unknown one.
        other: indices of the rest.
        ratio: the run's length over the median length of the others; 1 without others.
        unknown: the run's or a baseline's length is unknown, and the run has gone further than its baselines:
            they may have other schedules, or may still be running.
    """

    same: tuple[int, ...]
    other: tuple[int, ...]
    ratio: float = 1.0
    unknown: bool = False


def length(curve: LossCurve, axis: Axis) -> float | None:
    """Return where the schedule of a run ends, on an axis; None if unknown."""
    if not curve.planned or not len(curve):
        return None
    if axis == "steps":
        return float(curve.planned)
    step = float(curve.steps[-1])
    return float(curve.on(axis)[-1]) * (curve.planned / step if step > 0 else 1.0)


def has_ended(curve: LossCurve) -> bool:
    """Return whether a curve reaches the end of its schedule."""
    gap = float(np.median(np.diff(curve.steps[-20:]))) if len(curve) > 1 else 1.0
    return bool(curve.planned) and curve.steps[-1] + max(gap, SLACK * (curve.planned or 0)) >= (
        curve.planned or 0
    )


def compare_schedules(run: LossCurve, baselines: Sequence[LossCurve], axis: Axis) -> Schedules:
    """Split the baselines by whether their schedules end where the run's does."""
    mine = length(run, axis)
    lengths = [length(curve, axis) for curve in baselines]
    others = [i for i, other in enumerate(lengths) if mine and other and _differs(mine / other)]
    same = tuple(i for i in range(len(baselines)) if i not in others)
    ratio = 1.0
    if others and mine:
        ratio = mine / float(np.median([lengths[i] or mine for i in others]))
    furthest = max((float(curve.on(axis)[-1]) for curve in baselines if len(curve)), default=0.0)
    ahead = len(run) > 0 and float(run.on(axis)[-1]) > (1.0 + SLACK) * furthest
    return Schedules(same, tuple(others), ratio, ahead and (mine is None or None in lengths))


def _differs(ratio: float) -> bool:
    return abs(math.log(ratio)) > math.log1p(SLACK)


@dataclass(frozen=True)
class FinalLoss:
    """The final loss of one run.

    Attributes:
        mean: over the last part of its own curve.
        error: standard error of the mean, from the noise about a straight line.
        slope: change of the loss with the logarithm of the axis over the last half, in nats.
    """

    mean: float
    error: float
    slope: float


def final_of(curve: LossCurve, axis: Axis, fraction: float) -> FinalLoss | None:
    """The final loss of a curve; None if it has too few finite points."""
    x, losses = curve.on(axis), curve.losses
    finite = np.isfinite(losses)
    x, losses = x[finite], losses[finite]
    if len(x) < MIN_FINALS:
        return None
    half = len(x) // 2
    log = np.log(np.maximum(x[half:] - min(float(x[0]), 0.0), np.finfo(np.float64).tiny))
    slope, level = np.polyfit(log - log.mean(), losses[half:], 1)
    residuals = losses[half:] - level - slope * (log - log.mean())
    sums = Sums(residuals, newey_west_lags(len(residuals)) + 1)
    variance, _ = prewhitened(sums, np.array([0]), np.array([len(residuals)]))
    first = min(int(np.searchsorted(x, x[-1] - fraction * (x[-1] - x[0]))), len(x) - 5)
    return FinalLoss(
        float(losses[first:].mean()), math.sqrt(float(variance[0]) / (len(x) - first)), abs(float(slope))
    )
