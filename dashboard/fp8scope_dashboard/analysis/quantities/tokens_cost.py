"""The additional tokens that the first arm needs for the baseline's loss. Pure functions of arrays.

Near the end of the common range let s > 0 be how fast the baseline's loss falls with the logarithm of the
tokens, and D how much higher the first arm's loss is. Along this slope the first arm reaches the baseline's
loss at exp(D / s) times the tokens. Both are measured in the last third of the range, in at most 48 bins:

- D is the mean over the bins of the difference (for runs on the same data the noise of the batches cancels),
- s is the slope of a parabola in log tokens through the baseline's mean loss, half-way between the two
  positions that are compared: theta / 2 before the middle of the window (exact for a parabola).

The errors of both follow from the residuals of the fits (serial.py); D also has the spread of the seeds. The
two errors are uncorrelated, because the slope's weights add up to 0. The interval of theta = D / s is
Fieller's (1954): all theta with (D - theta s)^2 <= t^2 (var D + theta^2 var s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.quantities import arms, serial
from fp8scope_dashboard.analysis.quantities.measured import MeasuredRun
from fp8scope_dashboard.analysis.quantities.serial import Estimate, Fit
from fp8scope_dashboard.analysis.quantities.window import BinnedCurves, last_window
from fp8scope_dashboard.statistics.arrays import Floats

Axis = Literal["tokens", "steps"]
Refusal = Literal["few_points", "not_finite", "level", "rising", "beyond", "wide"]

SHARE: Final = 1.0 / 3.0
# A short run may use this share of its range.
WIDEST: Final = 0.8
# The slope must be so many standard errors from 0 (and significant). Otherwise the interval is wide,
# one-sided or the whole line.
CLEAR_SLOPE: Final = 3.0
# An interval that reaches a factor of 4 says nothing that a slope at one place could tell.
WIDEST_LOGARITHM: Final = math.log(4.0)
MIN_FINITE: Final = 9
ITERATIONS: Final = 4


@dataclass(frozen=True)
class LossSpread:
    """The standard deviation of the loss between seeds, in the unit of the loss, and its freedom."""

    value: float
    dof: float


@dataclass(frozen=True, kw_only=True)
class TokensCost:
    """The cost in tokens, or why it cannot be computed.

    Attributes:
        more: share of additional tokens, e.g. 0.018; negative if fewer are needed. None if refused.
        interval: of `more`.
        points: bins that were used; 0 if there were too few.
        limit: with 'beyond', the share of additional tokens that is exceeded.
    """

    axis: Axis
    more: float | None = None
    interval: tuple[float, float] | None = None
    points: int = 0
    refusal: Refusal | None = None
    limit: float | None = None
    has_seeds: bool = False


def tokens_cost(
    ours: Sequence[MeasuredRun],
    theirs: Sequence[MeasuredRun],
    *,
    level: float = 0.95,
    spread: LossSpread | None = None,
) -> TokensCost:
    """The additional tokens (or steps, if some run logs no tokens) of the first arm for the baseline's loss.

    Args:
        spread: of the seeds. By default it is estimated from the runs if there are enough; otherwise the
            interval holds for these runs only.
    """
    axis: Axis = "tokens" if all(run.tokens is not None for run in (*ours, *theirs)) else "steps"
    window = last_window([_curve(run, axis) for run in (*ours, *theirs)], SHARE, widest=WIDEST)
    if window is None:
        return TokensCost(axis=axis, refusal="few_points")
    finite: NDArray[np.bool_] = np.asarray(np.isfinite(window.values).all(axis=0))
    if not finite[-1] or finite.mean() < 0.75 or finite.sum() < MIN_FINITE:
        return TokensCost(axis=axis, refusal="not_finite")
    t = np.log(window.x[finite])
    t -= t.mean()
    values = window.values[:, finite]
    baseline = values[len(ours) :].mean(axis=0)
    parabola = serial.fit(np.stack([np.ones_like(t), t, t * t], axis=1), baseline)
    refusal = _refusal(_slope_at(parabola, 0.0), level)
    if refusal is not None:
        return TokensCost(axis=axis, points=len(t), refusal=refusal)
    delta, has_seeds = _delta(t, values[: len(ours)], values[len(ours) :], spread)
    return _cost(TokensCost(axis=axis, points=len(t), has_seeds=has_seeds), window, delta, parabola, level)


def _curve(run: MeasuredRun, axis: Axis) -> tuple[Floats, Floats]:
    x = run.loss.steps.astype(np.float64) if axis == "steps" or run.tokens is None else run.tokens
    # The logarithm needs positive positions; nothing is lost of a run that counts from 0.
    first = int(np.searchsorted(x, 0.0, side="right"))
    return x[first:], run.loss.values[first:]


def _slope_at(parabola: Fit, t: float) -> Estimate:
    """Return how fast the loss falls at t: positive for a falling loss."""
    weights = np.array([0.0, -1.0, -2.0 * t])
    return Estimate(
        float(weights @ parabola.coefficients),
        float(weights @ parabola.covariance @ weights),
        parabola.dof,
    )


def _refusal(slope: Estimate, level: float) -> Refusal | None:
    needed = max(CLEAR_SLOPE, serial.t_quantile(level, slope.dof)) * float(np.sqrt(slope.variance))
    if slope.value <= -needed and slope.value < 0.0:
        return "rising"
    return None if slope.value > needed else "level"


def _delta(t: Floats, ours: Floats, theirs: Floats, spread: LossSpread | None) -> tuple[Estimate, bool]:
    """The mean difference of the arms, and whether its error includes the spread between seeds."""
    difference = ours.mean(axis=0) - theirs.mean(axis=0)
    within = serial.fit(np.stack([np.ones_like(t), t], axis=1), difference).coefficient(0)
    if spread is not None:
        seeds = spread.value**2 * (1.0 / len(ours) + 1.0 / len(theirs))
        return arms.combined(within.value, [(within.variance, within.dof), (seeds, spread.dof)]), True
    if arms.source_of(len(ours), len(theirs)) == "within":
        return within, False
    means = [[Estimate(float(row.mean()), 0.0, 1.0) for row in arm] for arm in (ours, theirs)]
    return arms.difference(*means).estimate, True


def _cost(cost: TokensCost, window: BinnedCurves, delta: Estimate, parabola: Fit, level: float) -> TokensCost:
    span = float(np.log(window.high / window.low)) if window.low > 0.0 else np.inf
    slope = _slope_at(parabola, 0.0)
    theta = delta.value / slope.value
    if abs(theta) > span:
        limit = float(np.expm1(np.copysign(span, theta)))
        return TokensCost(axis=cost.axis, points=cost.points, refusal="beyond", limit=limit)
    for _ in range(ITERATIONS):
        half_way = _slope_at(parabola, -theta / 2.0)
        if _refusal(half_way, level) is not None:
            break
        slope, theta = half_way, delta.value / half_way.value
    bounds = fieller(delta, slope, level)
    if bounds is None:
        return TokensCost(axis=cost.axis, points=cost.points, refusal="level")
    low, high = bounds
    if max(abs(low), abs(high)) > WIDEST_LOGARITHM:
        return TokensCost(axis=cost.axis, points=cost.points, refusal="wide")
    return TokensCost(
        axis=cost.axis,
        more=float(np.expm1(theta)),
        interval=(float(np.expm1(low)), float(np.expm1(high))),
        points=cost.points,
        has_seeds=cost.has_seeds,
    )


def fieller(over: Estimate, under: Estimate, level: float) -> tuple[float, float] | None:
    """The interval of over / under for estimates with uncorrelated errors (Fieller 1954).

    None if `under` is not significantly different from 0, because the interval is then not bounded.
    """
    ratio = over.value / under.value
    total = arms.combined(0.0, [(over.variance, over.dof), (ratio**2 * under.variance, under.dof)])
    t = serial.t_quantile(level, total.dof)
    g = t**2 * under.variance / under.value**2
    if g >= 1.0:
        return None
    scaled = (over.variance * (1.0 - g) + ratio**2 * under.variance) / under.value**2
    half = t * float(np.sqrt(scaled))
    return (ratio - half) / (1.0 - g), (ratio + half) / (1.0 - g)
