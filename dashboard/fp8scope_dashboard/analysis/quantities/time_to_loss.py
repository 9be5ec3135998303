"""The training time after which each arm reaches the same loss. Pure functions of arrays.

The time of a run is the sum of its `step_seconds`, with pauses. The loss that is compared, the target, is the
highest of the runs' losses in the middle of their last third, so that every run has reached it.

Around the first step at which a run's smoothed loss is at the target, a parabola in the logarithm of the time
is fitted to its loss, in at most 48 bins. The run has reached the target where the parabola is there. The
variance of that logarithm is the parabola's variance there over the square of its slope (delta method,
serial.py), plus the relative variance of the time of a step over the number of steps until then. The ratio of
two arms is a difference of these logarithms (arms.py). A known spread sigma between seeds adds
sigma^2 (1/K + 1/K') over the square of the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from fp8scope_dashboard.analysis.quantities import arms, serial
from fp8scope_dashboard.analysis.quantities.arms import Source
from fp8scope_dashboard.analysis.quantities.measured import MeasuredRun
from fp8scope_dashboard.analysis.quantities.ratios import log_mean
from fp8scope_dashboard.analysis.quantities.serial import Estimate, Fit
from fp8scope_dashboard.analysis.quantities.tokens_cost import CLEAR_SLOPE, SHARE, WIDEST, LossSpread
from fp8scope_dashboard.analysis.quantities.window import BinnedCurves, last_window
from fp8scope_dashboard.statistics.arrays import Floats

Refusal = Literal["no_times", "begins_late", "few_points", "not_finite", "level", "rising", "never"]

MIN_ROWS: Final = 15
LATE: Final = 0.05
"""A run whose first loss comes after this share of its steps has trained before, for an unknown time."""
SMOOTHED: Final = 0.05
"""The share of a curve that is averaged to find where it first reaches the target."""
MIN_FINITE: Final = 9
ITERATIONS: Final = 4
NEWTON_STEPS: Final = 30


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """The times at which the arms reach the same loss, or why they are not known.

    Attributes:
        target: the loss that is compared.
        ours, theirs: seconds of training of each arm until then: geometric means of its runs.
        ratio: theirs over ours, so above 1 if the first arm is there first; None if refused.
        interval: of `ratio`.
        has_seeds: whether the interval includes the spread between seeds.
        points: bins of the run with the fewest.
    """

    target: float | None = None
    ours: float | None = None
    theirs: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    source: Source = "within"
    has_seeds: bool = False
    points: int = 0
    refusal: Refusal | None = None


@dataclass(frozen=True)
class TimedCurve:
    """The loss over the time of training.

    Attributes:
        times: seconds of training after each step, float64[N], increasing.
        losses: float64[N].
        pace: the logarithm of the mean time of a step after the warm-up.
    """

    times: Floats
    losses: Floats
    pace: Estimate


@dataclass(frozen=True)
class _Reached:
    """The logarithm of the time at which a run reaches the target, and how fast its loss falls there."""

    time: Estimate
    slope: float
    points: int


def time_to_loss(
    ours: Sequence[MeasuredRun],
    theirs: Sequence[MeasuredRun],
    *,
    level: float = 0.95,
    spread: LossSpread | None = None,
) -> TimeToLoss:
    """The training time of each arm until the same smoothed loss.

    Args:
        spread: of the loss between seeds. By default it is estimated from the runs if there are enough;
            otherwise the interval holds for these runs only.
    """
    curves = []
    for run in (*ours, *theirs):
        curve = timed_curve(run)
        if isinstance(curve, str):
            return TimeToLoss(refusal=curve)
        curves.append(curve)
    target = _target(curves, level)
    if isinstance(target, str):
        return TimeToLoss(refusal=target)
    reached = []
    for curve in curves:
        crossing = _crossing(curve, target, level)
        if isinstance(crossing, str):
            return TimeToLoss(target=target, refusal=crossing)
        reached.append(crossing)
    return _compared(target, reached[: len(ours)], reached[len(ours) :], level, spread)


def timed_curve(run: MeasuredRun) -> TimedCurve | Refusal:
    """The loss over the seconds of training, or why it has none.

    Each time stands for the steps since the time before it, because times of short steps come with every few
    steps only, and those of long runs as means.
    """
    line = run.scalars.get("step_seconds")
    if line is None:
        return "no_times"
    with np.errstate(invalid="ignore"):
        valid = np.isfinite(line.values) & (line.values > 0.0)
    steps, seconds = line.steps[valid].astype(np.float64), line.values[valid]
    if len(steps) < MIN_ROWS or len(run.loss) < MIN_ROWS:
        return "no_times" if len(steps) < MIN_ROWS else "few_points"
    if run.loss.steps[0] > LATE * run.end:
        return "begins_late"
    elapsed = np.cumsum(seconds * np.diff(steps, prepend=2.0 * steps[0] - steps[1]))
    timed = (run.loss.steps >= steps[0]) & (run.loss.steps <= steps[-1])
    if timed.sum() < MIN_ROWS:
        return "few_points"
    times = np.interp(run.loss.steps[timed], steps, elapsed)
    return TimedCurve(times, run.loss.values[timed], log_mean(seconds))


def _target(curves: Sequence[TimedCurve], level: float) -> float | Refusal:
    """The highest of the losses in the middle of the curves' last parts."""
    middles = []
    for curve in curves:
        around = _around(curve.times, curve.losses)
        if isinstance(around, str):
            return around
        _, parabola = around
        refusal = _refusal(parabola, 0.0, level)
        if refusal is not None:
            return refusal
        middles.append(float(parabola.coefficients[0]))
    return max(middles)


def _around(times: Floats, losses: Floats) -> tuple[tuple[Floats, float], Fit] | Refusal:
    """The last part of a curve: positions float64[B] about their middle, the middle, and a parabola."""
    window = last_window([(times, losses)], SHARE, widest=WIDEST)
    if window is None:
        return "few_points"
    finite_bins = _finite(window)
    if finite_bins is None:
        return "not_finite"
    t, values = finite_bins
    middle = float(t.mean())
    x = t - middle
    return (x, middle), serial.fit(np.stack([np.ones_like(x), x, x * x], axis=1), values)


def _finite(window: BinnedCurves) -> tuple[Floats, Floats] | None:
    """Logarithms of the positions and losses of bins with finite losses; None if too many have none."""
    finite = np.isfinite(window.values[0])
    if not finite[-1] or finite.mean() < 0.75 or finite.sum() < MIN_FINITE:
        return None
    return np.log(window.x[finite]), window.values[0, finite]


def _value(parabola: Fit, x: float) -> Estimate:
    return _combination(parabola, np.array([1.0, x, x * x]))


def _fall(parabola: Fit, x: float) -> Estimate:
    """The rate at which the loss falls at x: positive for a falling loss."""
    return _combination(parabola, np.array([0.0, -1.0, -2.0 * x]))


def _combination(parabola: Fit, weights: Floats) -> Estimate:
    variance = float(weights @ parabola.covariance @ weights)
    return Estimate(float(weights @ parabola.coefficients), max(0.0, variance), parabola.dof)


def _refusal(parabola: Fit, x: float, level: float) -> Refusal | None:
    fall = _fall(parabola, x)
    needed = max(CLEAR_SLOPE, serial.t_quantile(level, fall.dof)) * float(np.sqrt(fall.variance))
    if fall.value < 0.0 and fall.value <= -needed:
        return "rising"
    return None if fall.value > needed else "level"


def _crossing(curve: TimedCurve, target: float, level: float) -> _Reached | Refusal:
    """The point at which a curve first reaches the target."""
    times, losses = curve.times, curve.losses
    end = _first_below(times, losses, target)
    if end is None:
        return "never"
    for _ in range(ITERATIONS):
        # The window ends where it has the estimate in its middle.
        last = int(np.searchsorted(times, end * (1.0 + SHARE / 2.0), side="right"))
        around = _around(times[:last], losses[:last])
        if isinstance(around, str):
            return around
        (x, middle), parabola = around
        at = _solved(parabola, target)
        room = float(x[-1] - x[0]) / len(x)
        if at is not None and x[0] - room <= at <= x[-1] + room:
            refused = _refusal(parabola, at, level)
            if refused is not None:
                return refused
            fall = _fall(parabola, at).value
            loss = _value(parabola, at).variance / fall**2, parabola.dof
            pace = curve.pace.variance * float(times[-1]) / float(np.exp(middle + at)), curve.pace.dof
            return _Reached(arms.combined(middle + at, [loss, pace]), fall, len(x))
        # The smoothed curve is early or late there; the line through the middle says by how much.
        fall = _fall(parabola, 0.0).value
        if fall <= 0.0:
            return "level"
        step = float(np.clip((parabola.coefficients[0] - target) / fall, x[0], x[-1]))
        end = min(float(times[-1]), float(np.exp(middle + step)))
    return "never"


def _first_below(times: Floats, losses: Floats, target: float) -> float | None:
    """The time at which the moving average of a curve is first at or below the target."""
    width = max(1, int(SMOOTHED * len(losses)))
    with np.errstate(invalid="ignore", over="ignore"):
        smooth = np.convolve(losses, np.full(width, 1.0 / width), mode="valid")
        below = np.flatnonzero(smooth <= target)
    return float(times[below[0] + width // 2]) if len(below) else None


def _solved(parabola: Fit, target: float) -> float | None:
    """The position near the middle at which a parabola is at the target (Newton); None if it turns before."""
    x = 0.0
    for _ in range(NEWTON_STEPS):
        fall = _fall(parabola, x).value
        if fall <= 0.0:
            return None
        step = (_value(parabola, x).value - target) / fall
        x += step
        if abs(step) < 1e-12:
            return x
    return None


def _compared(
    target: float,
    ours: Sequence[_Reached],
    theirs: Sequence[_Reached],
    level: float,
    spread: LossSpread | None,
) -> TimeToLoss:
    sides = [[run.time for run in arm] for arm in (ours, theirs)]
    runs = arms.difference(sides[1], sides[0])
    estimate, source, has_seeds = runs.estimate, runs.source, runs.source == "runs"
    if spread is not None:
        estimate, source, has_seeds = _with_spread(estimate.value, ours, theirs, spread), "within", True
    low, high = estimate.interval(level)
    means = [float(np.exp(np.mean([run.value for run in arm]))) for arm in sides]
    result = TimeToLoss(
        target=target,
        ours=means[0],
        theirs=means[1],
        ratio=float(np.exp(estimate.value)),
        source=source,
        has_seeds=has_seeds,
        points=min(run.points for run in (*ours, *theirs)),
    )
    # Logarithms of equal curves may differ in the last bit.
    if estimate.variance <= 1e-24:
        return result
    return replace(result, interval=(float(np.exp(low)), float(np.exp(high))))


def _with_spread(
    value: float, ours: Sequence[_Reached], theirs: Sequence[_Reached], spread: LossSpread
) -> Estimate:
    """The noise within the runs and the spread between seeds, which the slopes turn into time."""
    terms = [(run.time.variance / len(arm) ** 2, run.time.dof) for arm in (ours, theirs) for run in arm]
    seeds = sum(float(np.mean([run.slope**-2.0 for run in arm])) / len(arm) for arm in (ours, theirs))
    return arms.combined(value, [*terms, (spread.value**2 * seeds, spread.dof)])
