"""The verdict on a training loss: equivalent, worse, better, or cannot tell yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fp8scope_dashboard.analysis.losses.alignment import Aligned, Axis, LossCurve, align, clean
from fp8scope_dashboard.analysis.losses.arms import two_one_sided_tests
from fp8scope_dashboard.analysis.losses.conclusions import (
    MIN_LEVEL,
    VerdictInputs,
    of_arms,
    of_finals,
    of_pair,
    with_sample_size,
)
from fp8scope_dashboard.analysis.losses.harm import Harm, harm_of
from fp8scope_dashboard.analysis.losses.noise import bootstrap_interval, hac_interval
from fp8scope_dashboard.analysis.losses.result import Basis, LossComparison, Onset
from fp8scope_dashboard.analysis.losses.sample_size import movement
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, PUBLIC_NATS, Prior, Spread, odd_seeds, spread_of
from fp8scope_dashboard.analysis.losses.selection import Selection, select
from fp8scope_dashboard.analysis.losses.sequence import COMMON_POINTS, Looks, last_point, sequence, windows
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text import verdicts
from fp8scope_dashboard.text.numbers import SMALLEST, percent, usable

# The final window: late enough that the learning rate is at its lowest and the loss nearly level, so that its
# mean is meaningful; long enough to average out the noise of the batches.
WINDOW_FRACTION = 0.1
CURVE_POINTS = 200
# The usual distance between points is measured on this many points at the end.
CADENCE_POINTS = 20
# Losses within this many standard deviations of 0, or below this many nats, have no relative difference.
DEVIATIONS_FROM_ZERO, NATS_FROM_ZERO = 3.0, 0.02
# Several seeds are compared on at least so many points: the last ones of an evaluation's curve.
MIN_POINTS_OF_ARMS = 5


def compare_losses(
    runs: Sequence[LossCurve],
    baselines: Sequence[LossCurve],
    *,
    margin: float,
    alpha: float,
    margin_nats: float | None = None,
    window_fraction: float = WINDOW_FRACTION,
    prior: Prior = PUBLIC,
) -> LossComparison:
    """Compare an arm of runs that differ only in their seed with a baseline arm.

    Args:
        runs: the run to judge first, then others of its seed group.
        baselines: the runs of the baseline group.
        margin: relative difference that counts as none, > 0 (nats, where the loss is near 0).
        alpha: probability of a wrong 'worse' or 'better' over a whole run, 0 < alpha <= 0.5.
        margin_nats: the margin in the unit of the loss, in place of `margin`, > 0.
        window_fraction: least part of the common range, at its end, whose mean loss is compared.
        prior: of the spread between seeds, from `seeds.pooled_prior`.

    Raises:
        ValueError: no run was given.
    """
    if not runs:
        raise ValueError("Nothing to compare: give at least one run.")
    runs, baselines = [clean(curve) for curve in runs], [clean(curve) for curve in baselines]
    logged = sum(1 for curve in baselines if len(curve))
    nothing = LossComparison(
        verdict="cannot_tell",
        explanation="",
        unit="relative" if margin_nats is None else "nats",
        margin=margin if margin_nats is None else margin_nats,
        margin_nats=margin_nats,
        k_run=1,
        k_baseline=logged,
    )
    if not len(runs[0]):
        return replace(nothing, explanation=verdicts.NO_LOSS)
    if not logged:
        return replace(nothing, explanation="The baseline group has no run with a loss yet.")
    chosen = select(runs, baselines, COMMON_POINTS, 1.0 - window_fraction)
    nothing = replace(nothing, k_baseline=len(chosen.baselines), warnings=tuple(chosen.warnings))
    if not chosen.baselines:
        return replace(nothing, explanation="No baseline run has a finite loss at its end.")
    aligned = _common_points(runs, baselines, chosen)
    nothing = replace(nothing, k_run=len(chosen.runs), aligned_on=aligned.axis, paired=aligned.paired)
    if len(aligned.x) < _least_points(chosen):
        return _diverged(nothing, runs, chosen) if chosen.diverged else _too_few(nothing, aligned, chosen)
    common, measured = _measure(
        replace(nothing, warnings=(*nothing.warnings, *_lapses(runs[0], chosen))),
        runs[0],
        baselines,
        chosen,
        aligned,
        alpha,
        window_fraction,
        prior,
    )
    if chosen.diverged:
        shown = replace(
            nothing, unit=common.unit, margin=common.margin, curve=common.curve, basis=common.basis
        )
        return _diverged(shown, runs, chosen)
    judged = _judged(common, measured, runs, baselines, chosen, alpha, window_fraction)
    harm = None if chosen.finals or chosen.uncertain else measured.harm
    if harm is not None and judged.verdict != "worse" and _holds_for_seeds(common, measured, harm, alpha):
        judged = _became_worse(judged, measured, harm, aligned, runs[0])
    return replace(judged, explanation=_explanation(judged, alpha))


def _common_points(runs: Sequence[LossCurve], baselines: Sequence[LossCurve], chosen: Selection) -> Aligned:
    """The chosen runs, then the chosen baselines, at the points where each of them has a usable loss."""
    aligned = align([*(runs[i] for i in chosen.runs), *(baselines[i] for i in chosen.baselines)])
    usable_columns = usable(aligned.losses).all(axis=0)
    return replace(aligned, x=aligned.x[usable_columns], losses=aligned.losses[:, usable_columns])


def _least_points(chosen: Selection) -> int:
    """The least common points for a measurement.

    Several seeds that have ended show their noise themselves, on however few points.
    """
    of_seeds = chosen.ended and not chosen.finals and min(len(chosen.runs), len(chosen.baselines)) >= 2
    return MIN_POINTS_OF_ARMS if of_seeds else COMMON_POINTS


def _too_few(nothing: LossComparison, aligned: Aligned, chosen: Selection) -> LossComparison:
    """No verdict, and no warning about a comparison that was not made."""
    compared = verdicts.schedules_differ(chosen.ratio, finals=True)
    return replace(
        nothing,
        warnings=tuple(warning for warning in nothing.warnings if warning != compared),
        explanation=verdicts.too_few_points(len(aligned.x), COMMON_POINTS),
    )


def _judged(
    common: LossComparison,
    measured: VerdictInputs,
    runs: Sequence[LossCurve],
    baselines: Sequence[LossCurve],
    chosen: Selection,
    alpha: float,
    fraction: float,
) -> LossComparison:
    """The verdict on a measured difference: from final losses, the seeds of both arms, or one pair."""
    if chosen.finals and common.basis is not None:
        arms = [runs[i] for i in chosen.runs], [baselines[i] for i in common.basis.baselines]
        judged = of_finals(common, measured, *arms, chosen, alpha, fraction)
    elif min(measured.counts) >= 2:
        judged = of_arms(common, measured, alpha, ended=chosen.ended)
    else:
        judged = of_pair(common, measured, alpha)
    if chosen.uncertain:
        judged = replace(judged, verdict="cannot_tell", judged_margin=None)
    return with_sample_size(judged, measured, alpha)


def _became_worse(
    judged: LossComparison, measured: VerdictInputs, harm: Harm, aligned: Aligned, run: LossCurve
) -> LossComparison:
    """The comparison of a run that has left its baseline, with the window and the interval that show it."""
    x = aligned.x
    since, decided = float(x[harm.onset]), float(x[harm.decided])
    level, before = (float(arm[:, harm.start :].mean()) for arm in (measured.ours, measured.theirs))
    return replace(
        judged,
        verdict="worse",
        method="loss above the baseline since an onset, by the noise before it",
        tolerance=harm.tolerance,
        judged_margin=None,
        delta=harm.delta,
        interval=(harm.delta - harm.half, harm.delta + harm.half),
        p_value=None,
        needs=None,
        moving=None,
        wanders=False,
        smallest_detectable=harm.tolerance + harm.half,
        window=(float(x[harm.start]), float(x[-1])),
        loss=level,
        baseline_loss=before,
        onset=Onset(
            since=since,
            decided=decided,
            since_step=_step_at(run, since, aligned.axis),
            decided_step=_step_at(run, decided, aligned.axis),
            points=len(x) - harm.start,
        ),
    )


def _holds_for_seeds(common: LossComparison, measured: VerdictInputs, harm: Harm, alpha: float) -> bool:
    """Return whether the seeds of both arms bear a harm out.

    Those of the judged arm may spread by themselves.
    """
    if min(measured.counts) < 2:
        return True
    ours, theirs = (arm[:, harm.start :].mean(axis=1) for arm in (measured.ours, measured.theirs))
    scale = 1.0 if common.unit == "nats" else abs(float(theirs.mean()))
    # The noise within the window is part of the harm's interval: that of the whole run holds the harm.
    spread = spread_of([ours / scale, theirs / scale], measured.prior, seeds=measured.spread.seeds)
    test = two_one_sided_tests(ours, theirs, common.margin, alpha, spread, scale=scale)
    return test.delta - math.hypot(test.delta - test.claim[0], harm.half) > common.margin


def _step_at(run: LossCurve, x: float, axis: Axis) -> int:
    """The run's first step at or after a point of an axis."""
    at = int(np.searchsorted(run.on(axis), x, side="left"))
    return int(run.steps[min(at, len(run) - 1)])


def _measure(
    nothing: LossComparison,
    run: LossCurve,
    baselines: Sequence[LossCurve],
    chosen: Selection,
    aligned: Aligned,
    alpha: float,
    fraction: float,
    prior: Prior,
) -> tuple[LossComparison, VerdictInputs]:
    """The measured difference of runs with enough points in common, without a verdict."""
    points = len(aligned.x)
    few = points < COMMON_POINTS
    least = points if few else COMMON_POINTS
    stop = np.unique(np.linspace(least, points, min(CURVE_POINTS, points)).astype(np.int64))
    first = points - 1 if few else int(windows(aligned.x, stop[-1:], fraction)[0][0])
    ours, theirs = aligned.losses[: len(chosen.runs)], aligned.losses[len(chosen.runs) :]
    unit, scale = _scale(theirs, first)
    if unit == "nats":
        prior = PUBLIC_NATS
    odd = odd_seeds(theirs[:, first:].mean(axis=1) / scale, prior)
    theirs = np.delete(theirs, odd, axis=0)
    if unit == "relative":
        scale = abs(float(theirs[:, first:].mean()))
    if nothing.margin_nats is not None:
        # Relative to the level at the end, which the difference there is divided by, too.
        nothing = replace(nothing, margin=nothing.margin_nats / scale)
    difference = _difference(ours, theirs, unit, scale)
    if few:
        looks = last_point(difference)
    else:
        looks = sequence(aligned.x, difference, stop, alpha=alpha, fraction=fraction, ended=chosen.ended)
    means = [arm[:, first:].mean(axis=1) for arm in (ours, theirs)]
    spread = spread_of([arm / scale for arm in means], prior, seeds=len(theirs))
    spread = replace(spread, odd=tuple(chosen.baselines[i] for i in odd))
    harm = (
        None
        if few
        else harm_of(
            ours, theirs, margin=nothing.margin, alpha=alpha, spread=prior.spread, nats=unit == "nats"
        )
    )
    measured = VerdictInputs(
        ours=ours, theirs=theirs, looks=looks, scale=scale, spread=spread, prior=prior, harm=harm
    )
    pointwise, moving = difference[first:], movement(aligned.x, difference)
    common = replace(
        nothing,
        unit=unit,
        k_baseline=len(theirs),
        window=(float(aligned.x[first]), float(aligned.x[-1])),
        loss=float(means[0].mean()),
        baseline_loss=float(means[1].mean()),
        baseline_losses=tuple(float(mean) for mean in means[1]),
        noise_interval=None if few else hac_interval(pointwise, alpha),
        bootstrap_interval=None if few else bootstrap_interval(pointwise, alpha),
        seed_spread=spread.as_dict(),
        moving=None if moving is None else asdict(moving),
        warnings=(*nothing.warnings, *_seed_warnings(spread, baselines, unit)),
        curve=_curve(aligned, looks),
        basis=_basis(run, aligned, chosen, [i for i in chosen.baselines if i not in spread.odd]),
    )
    return common, measured


def _scale(theirs: Floats, first: int) -> tuple[str, float]:
    """The unit of the differences, and what they are divided by: the baseline's loss unless it is near 0."""
    last = theirs[:, first:]
    levels = last.mean(axis=1)
    level = float(np.median(levels))
    near = abs(level) < max(
        NATS_FROM_ZERO, SMALLEST, DEVIATIONS_FROM_ZERO * float(np.median(last.std(axis=1)))
    )
    crosses = bool((levels * np.sign(level) <= 0.0).any())
    return ("nats", 1.0) if crosses or near else ("relative", abs(float(levels.mean())))


def _basis(run: LossCurve, aligned: Aligned, chosen: Selection, used: Sequence[int]) -> Basis:
    last = aligned.x[-CADENCE_POINTS:]
    at = np.searchsorted(run.on(aligned.axis), last, side="right") - 1
    steps = run.steps[at.clip(min=0)]
    return Basis(
        end=float(last[-1]),
        gap=float(np.median(np.diff(last))),
        step=int(steps[-1]),
        step_gap=max(1.0, float(np.median(np.diff(steps)))),
        runs=chosen.runs,
        baselines=tuple(used),
    )


def _difference(ours: Floats, theirs: Floats, unit: str, scale: float) -> Floats:
    """The difference of the arms' means at each point: in nats, or over the local level of the baseline.

    The level is a moving mean: dividing by single noisy losses would bias the mean, and dividing by one level
    would turn a constant relative difference into a trend.
    """
    baseline = theirs.mean(axis=0)
    difference = ours.mean(axis=0) - baseline
    if unit == "nats":
        return np.asarray(difference)
    half = max(2, len(baseline) // 40)
    sums = np.concatenate([[0.0], np.cumsum(baseline)])
    start = np.maximum(np.arange(len(baseline)) - half, 0)
    stop = np.minimum(np.arange(len(baseline)) + half + 1, len(baseline))
    level = np.abs(sums[stop] - sums[start]) / (stop - start)
    return np.asarray(difference / np.maximum(level, MIN_LEVEL * scale))


def _curve(aligned: Aligned, looks: Looks) -> dict[str, Any]:
    """The confidence sequence as a page draws it: what a look at each point would have shown."""
    finite = usable(looks.level) & usable(looks.half)
    level, half = looks.level[finite], looks.half[finite]
    return {
        "x_name": aligned.axis,
        "x": aligned.x[looks.stop - 1][finite].tolist(),
        "delta": level.tolist(),
        "low": (level - half).tolist(),
        "high": (level + half).tolist(),
    }


def _lapses(run: LossCurve, chosen: Selection) -> tuple[str, ...]:
    """A warning if the judged run's loss was not finite and has recovered."""
    broken = np.flatnonzero(~np.isfinite(run.losses))
    if not len(broken) or 0 in chosen.diverged:
        return ()
    first, last = (int(run.steps[broken[i]]) for i in (0, -1))
    return (verdicts.recovered(len(broken), first, last),)


def _seed_warnings(spread: Spread, baselines: Sequence[LossCurve], unit: str) -> list[str]:
    warnings = []
    if spread.odd:
        warnings.append(verdicts.odd_seeds([baselines[i].label(i) for i in spread.odd], spread.seeds))
    if spread.wide and unit == "relative":
        warnings.append(verdicts.wide_spread(percent(spread.value)))
    return warnings


def _diverged(nothing: LossComparison, runs: Sequence[LossCurve], chosen: Selection) -> LossComparison:
    first = runs[chosen.diverged[0]]
    since = float(first.on(chosen.axis)[_broken_since(first.losses)])
    taking_part = len({*chosen.runs, *chosen.diverged})
    return replace(
        nothing,
        verdict="worse",
        method="loss not finite",
        tolerance=nothing.margin,
        k_run=taking_part,
        explanation=verdicts.diverged(since, chosen.axis, len(chosen.diverged), taking_part),
    )


def _broken_since(losses: Floats) -> int:
    """Index from which the loss is not finite to the end."""
    finite = np.flatnonzero(np.isfinite(losses))
    return int(finite[-1]) + 1 if len(finite) else 0


def _explanation(judged: LossComparison, alpha: float) -> str:
    if judged.delta is None or judged.interval is None or judged.seed_spread is None:
        return "The runs have too few finite losses at their ends."
    needs = judged.needs or {}
    return verdicts.loss(
        verdicts.LossFacts(
            verdict=judged.verdict,
            relative=judged.unit == "relative",
            arms=judged.p_value is not None,
            loss=judged.loss or 0.0,
            baseline_loss=judged.baseline_loss or 0.0,
            runs=judged.k_run,
            baselines=judged.k_baseline,
            delta=judged.delta,
            interval=judged.interval,
            level=1.0 - 2.0 * alpha,
            tolerance=judged.tolerance or judged.margin,
            margin=judged.margin,
            margin_nats=judged.margin_nats,
            source=judged.seed_spread["source"],
            detectable=judged.smallest_detectable or 0.0,
            steps=needs.get("steps"),
            seeds=needs.get("seeds"),
            axis=judged.aligned_on,
            wanders=judged.wanders,
            moving=None if judged.moving is None else (judged.moving["since"], judged.moving["change"]),
            onset=judged.onset.since_step if judged.onset else None,
            decided=judged.onset.decided_step if judged.onset else None,
            points=judged.onset.points if judged.onset else 0,
        )
    )
