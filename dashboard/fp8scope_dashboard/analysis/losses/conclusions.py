"""The conclusion of a comparison: from one pair, from several seeds in both arms, or from final losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.arms import (
    MAX_ERROR,
    EquivalenceTest,
    conclusion,
    tail,
    two_one_sided_tests,
)
from fp8scope_dashboard.analysis.losses.harm import Harm
from fp8scope_dashboard.analysis.losses.onsets import wandering
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.sample_size import seeds_needed, steps_needed
from fp8scope_dashboard.analysis.losses.schedules import final_of
from fp8scope_dashboard.analysis.losses.seeds import Prior, Spread, cautious_spread, spread_of
from fp8scope_dashboard.analysis.losses.selection import Selection
from fp8scope_dashboard.analysis.losses.sequence import Looks
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.student import upper_quantile

# 'Equivalent' holds within the margin, or within twice the margin where the evidence suffices for that only.
# It always names the margin that it was judged by.
RUNGS = (1.0, 2.0)
# Several arms: a difference must show in so many consecutive windows, unless the run has ended.
PERSISTENCE = 3
# Early losses near 0 must not make relative differences huge: the least level, over that in the window.
MIN_LEVEL = 0.1
# Of a probability of 80 %, with which the smallest detectable difference would be found.
POWER_QUANTILE = 0.8416212335729143


@dataclass(frozen=True, kw_only=True)
class VerdictInputs:
    """The inputs of a verdict.

    Attributes:
        ours, theirs: float64[m, n] and float64[K, n], losses at the compared points.
        looks: the confidence sequence of the difference of their means, relative or in nats.
        scale: the level that differences are relative to; 1 for nats.
        prior: of the spread between seeds.
        harm: that has begun and goes on at the last point.
    """

    ours: Floats
    theirs: Floats
    looks: Looks
    scale: float
    spread: Spread
    prior: Prior
    harm: Harm | None = None

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.ours), len(self.theirs)


@dataclass(frozen=True)
class Bound:
    """The basis of a claim of equivalence: the half-width of delta's interval over noise and seeds.

    `error` and `freedom` are those of its Student's t.
    """

    reach: float
    error: float
    freedom: float


def of_pair(common: LossComparison, measured: VerdictInputs, alpha: float) -> LossComparison:
    """One run in an arm: the anytime-valid interval of the pair against the tolerance.

    The tolerance is the larger of the margin and the difference that two seeds of one configuration exceed
    with probability alpha.
    """
    spread, looks = measured.spread, measured.looks
    error = spread.error(*measured.counts)
    delta, noise = float(looks.level[-1]), float(looks.error[-1])
    half = min(float(looks.half[-1]), MAX_ERROR)
    judged = _against_tolerance(
        replace(common, method="anytime-valid interval of the pair against the spread between seeds"),
        delta,
        half,
        max(common.margin, spread.quantile(alpha) * error),
        math.hypot(noise, error),
        _bound(_finals_of(measured), measured.prior, spread.seeds, alpha, half=half),
    )
    if judged.verdict in ("worse", "better") and _may_have_wandered(measured, judged.verdict, common.unit):
        return replace(judged, verdict="cannot_tell", wanders=True)
    return judged


def _may_have_wandered(measured: VerdictInputs, verdict: str, unit: str) -> bool:
    """Return whether seeds that wander lastingly may explain the difference in the window."""
    centre = measured.theirs.mean(axis=0)
    scale = np.maximum(np.abs(centre), MIN_LEVEL * measured.scale) if unit == "relative" else measured.scale
    side = 1.0 if verdict == "worse" else -1.0
    difference = side * (measured.ours.mean(axis=0) - centre) / scale
    deviations = (measured.theirs - centre) / scale
    state = wandering.fresh()
    for step, (value, row) in enumerate(zip(difference.tolist(), deviations.T.tolist(), strict=True)):
        wandering.add(state, step, value, row)
    points = len(difference) - int(measured.looks.start[-1])
    runs, seeds = measured.counts
    return wandering.explains(state, points, float(runs), seeds, measured.prior.spread)


def _finals_of(measured: VerdictInputs) -> list[Floats]:
    """Mean losses of the seeds of both arms in the window, over the scale."""
    begin = int(measured.looks.start[-1])
    return [arm[:, begin:].mean(axis=1) / measured.scale for arm in (measured.ours, measured.theirs)]


def _bound(
    values: Sequence[Floats], prior: Prior, seeds: int, alpha: float, *, half: float = 0.0, noise: float = 0.0
) -> Bound:
    """The bound of equivalence from the seeds' spread at level alpha, and the noise's half-width."""
    spread = cautious_spread(values, prior, seeds=seeds, noise=noise)
    error = spread.error(*(len(arm) for arm in values))
    quantile = upper_quantile(alpha, spread.freedom)
    reach = min(math.hypot(quantile * error, half), MAX_ERROR)
    return Bound(reach, reach / quantile, spread.freedom)


def _rung(delta: float, reach: float, margin: float) -> float | None:
    """The smallest margin within which delta surely is; None if it is within none."""
    return next((rung * margin for rung in RUNGS if abs(delta) + reach <= rung * margin), None)


def _equivalent(judged: LossComparison, bound: Bound) -> LossComparison:
    """The comparison as 'equivalent', if it is, with the interval and the margin that decide."""
    delta = judged.delta or 0.0
    within = _rung(delta, bound.reach, judged.margin)
    if within is None:
        return judged
    return replace(
        judged,
        verdict="equivalent",
        judged_margin=within,
        tolerance=within,
        interval=(delta - bound.reach, delta + bound.reach),
    )


def _against_tolerance(
    common: LossComparison, delta: float, half: float, tolerance: float, error: float, bound: Bound
) -> LossComparison:
    interval = (delta - half, delta + half)
    verdict = conclusion(interval, interval, tolerance)
    judged = replace(
        common,
        verdict="cannot_tell" if verdict == "equivalent" else verdict,
        tolerance=tolerance,
        delta=delta,
        interval=interval,
        smallest_detectable=min(tolerance + half + POWER_QUANTILE * error, MAX_ERROR),
    )
    return judged if verdict in ("worse", "better") else _equivalent(judged, bound)


def of_arms(common: LossComparison, measured: VerdictInputs, alpha: float, *, ended: bool) -> LossComparison:
    """Two or more runs in both arms: two one-sided tests over seeds.

    While the run goes on, 'worse' and 'better' must hold in PERSISTENCE windows in a row, with an interval
    that is wider by the price of looking at the noise within the window many times.
    """
    begin = int(measured.looks.start[-1])
    size = measured.ours.shape[1] - begin
    tests = [
        _test(common, measured, slice(max(begin - back * size, 0), max(begin - back * size, 0) + size), alpha)
        for back in range(1 if ended else PERSISTENCE)
    ]
    test = tests[0]
    looks_half = 0.0 if ended else float(measured.looks.half[-1])
    reach = min(math.hypot((test.claim[1] - test.claim[0]) / 2.0, looks_half), MAX_ERROR)
    sure = abs(test.delta) - reach > common.margin and all(other.verdict == test.verdict for other in tests)
    judged = replace(
        common,
        verdict=test.verdict if sure and test.verdict in ("worse", "better") else "cannot_tell",
        method="two one-sided t-tests over seeds",
        tolerance=common.margin,
        delta=test.delta,
        interval=test.interval,
        p_value=test.p_value,
        smallest_detectable=min(common.margin + reach + POWER_QUANTILE * test.error, MAX_ERROR),
    )
    if judged.verdict != "cannot_tell":
        return judged
    bound = _bound_of_arms(measured, test, alpha)
    judged = _equivalent(judged, replace(bound, reach=math.hypot(bound.reach, looks_half)))
    within = judged.judged_margin or common.margin
    tails = [tail(side * test.delta + within, bound.error, bound.freedom) for side in (1.0, -1.0)]
    return replace(judged, p_value=max(tails))


def _bound_of_arms(measured: VerdictInputs, test: EquivalenceTest, alpha: float) -> Bound:
    """The bound of equivalence of several seeds; Welch's where the test is Welch's."""
    if not test.pooled:
        return Bound((test.interval[1] - test.interval[0]) / 2.0, test.error, test.freedom)
    noise = _noise_of_seed(measured)
    return _bound(_finals_of(measured), measured.prior, measured.spread.seeds, alpha, noise=noise)


def _noise_of_seed(measured: VerdictInputs) -> float:
    """Standard error of one run's mean in the window, from that of the difference of the arms' means."""
    return float(measured.looks.error[-1]) / math.sqrt(sum(1.0 / count for count in measured.counts))


def _test(common: LossComparison, measured: VerdictInputs, part: slice, alpha: float) -> EquivalenceTest:
    ours, theirs = (arm[:, part].mean(axis=1) for arm in (measured.ours, measured.theirs))
    error = float(measured.looks.error[-1])
    spread = None
    if math.isfinite(error):
        noise = _noise_of_seed(measured)
        values = [ours / measured.scale, theirs / measured.scale]
        spread = spread_of(values, measured.prior, seeds=measured.spread.seeds, noise=noise)
    return two_one_sided_tests(ours, theirs, common.margin, alpha, spread, scale=measured.scale)


def of_finals(
    common: LossComparison,
    measured: VerdictInputs,
    runs: Sequence[LossCurve],
    baselines: Sequence[LossCurve],
    selection: Selection,
    alpha: float,
    fraction: float,
) -> LossComparison:
    """Runs whose schedules have other lengths: each run's final loss, at its own end.

    A longer training gives a lower loss by itself: the interval is widened on both sides by what the local
    slope of the loss over the logarithm of its length predicts for the difference in length.
    """
    ours, theirs = (
        [final_of(curve, common.aligned_on, fraction) for curve in arm] for arm in (runs, baselines)
    )
    mine = [curve for curve in ours if curve is not None]
    others = [curve for curve in theirs if curve is not None]
    if not mine or not others:
        return common
    scale = measured.scale
    delta = float(np.mean([other.mean for other in mine]) - np.mean([other.mean for other in others])) / scale
    noise = math.hypot(*(_mean_error([curve.error for curve in arm]) for arm in (mine, others))) / scale
    slope = max(means.slope for means in (*mine, *others)) / scale
    half = -float(scipy.special.ndtri(alpha / 2.0)) * noise + slope * abs(math.log(selection.ratio))
    error = measured.spread.error(len(mine), len(others))
    return _against_tolerance(
        replace(
            common,
            method="final losses of schedules of different lengths",
            loss=float(np.mean([mean.mean for mean in mine])),
            baseline_loss=float(np.mean([other.mean for other in others])),
        ),
        delta,
        half,
        max(common.margin, measured.spread.quantile(alpha) * error),
        math.hypot(noise, error),
        _bound(
            [np.array([curve.mean for curve in arm]) / scale for arm in (mine, others)],
            measured.prior,
            measured.spread.seeds,
            alpha,
            half=half,
        ),
    )


def _mean_error(errors: Sequence[float]) -> float:
    """Standard error of the mean of independent values."""
    return math.hypot(*errors) / len(errors)


def with_sample_size(judged: LossComparison, measured: VerdictInputs, alpha: float) -> LossComparison:
    """The comparison with what would decide it, if it is undecided."""
    if judged.verdict != "cannot_tell" or judged.delta is None or judged.interval is None:
        return replace(judged, moving=None)
    steps = None
    if (
        judged.moving is None
        and judged.p_value is None
        and judged.basis is not None
        and judged.tolerance is not None
    ):
        half = (judged.interval[1] - judged.interval[0]) / 2.0
        points = measured.ours.shape[1]
        steps = steps_needed(judged.delta, half, judged.tolerance, points, judged.basis.step_gap)
    have = min(measured.counts)
    count = seeds_needed(judged.delta, measured.spread, judged.margin, alpha, have)
    return replace(judged, needs={"steps": steps, "seeds": count})
