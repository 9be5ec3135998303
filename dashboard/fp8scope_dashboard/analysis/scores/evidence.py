"""The difference and the seed spread of one task, before the tasks of a comparison are judged together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8scope_dashboard.analysis.losses.seeds import Prior, odd_seeds, variance_of
from fp8scope_dashboard.analysis.own_differences import RunDifference, with_left
from fp8scope_dashboard.analysis.scores import intervals
from fp8scope_dashboard.analysis.scores.differences import ScoreDifference, paired, unpaired
from fp8scope_dashboard.analysis.scores.intervals import UNLIMITED, Interval
from fp8scope_dashboard.analysis.scores.metrics import default_margin, limits_of
from fp8scope_dashboard.analysis.scores.pairing import aligned
from fp8scope_dashboard.analysis.scores.result import ITEMS, RunScore, ScoreComparison, TaskScores
from fp8scope_dashboard.analysis.scores.seeds import (
    SAME_WEIGHTS,
    ScoreSpread,
    offset_prior,
    own_spread,
    public_spread,
)
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text import score_verdicts as text
from fp8scope_dashboard.text.numbers import count, usable


@dataclass(frozen=True, kw_only=True)
class TaskEvidence:
    """A task's difference and seed spread, before the tasks are pooled and adjusted."""

    task: TaskScores
    base: ScoreComparison
    difference: ScoreDifference
    spread: ScoreSpread
    prior: Prior
    margin: float
    arms: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The difference of a task, with the baselines that took part."""

    baselines: Sequence[RunScore]
    difference: ScoreDifference
    spread: ScoreSpread
    prior: Prior
    own: list[RunDifference]
    warnings: list[str]


def item_interval(
    score: RunScore, alpha: float, *, proportion: bool, exact: bool = False, limits: Interval = UNLIMITED
) -> tuple[Interval, str]:
    """One run's interval over its items, and the name of the method.

    Clustered standard errors for clustered items. Otherwise Wilson for proportions (Clopper-Pearson if
    `exact`) and Student-t for means.
    """
    if proportion:
        limits = Interval(0.0, 1.0)
    if score.clusters is not None:
        return intervals.mean_interval(score.items, alpha, score.clusters, limits), "clustered Student-t"
    if not proportion:
        return intervals.mean_interval(score.items, alpha, limits=limits), "Student-t over items"
    successes, n = int(score.items.sum()), len(score.items)
    if exact:
        return intervals.clopper_pearson(successes, n, alpha), "Clopper-Pearson"
    return intervals.wilson(successes, n, alpha), "Wilson"


def prepare(task: TaskScores, alpha: float, loss_margin: float) -> TaskEvidence | ScoreComparison:
    """The evidence on a task, or the verdict if there is not enough."""
    run = task.arm[0]
    sound = [score for score in task.baselines if len(score.items) >= ITEMS and usable(score.items).all()]
    arm = [score for score in task.arm if len(score.items) >= ITEMS and usable(score.items).all()]
    nothing = ScoreComparison(
        verdict="cannot_tell", explanation="", n=len(run.items), k_run=len(arm), k_baseline=len(sound)
    )
    broken = int(np.count_nonzero(~usable(run.items)))
    if broken:
        explanation = f"{broken} of {count(len(run.items), 'item')} scored NaN or infinite."
        return replace(nothing, verdict="worse", method="score not finite", explanation=explanation)
    if len(run.items) < ITEMS:
        explanation = f"{count(len(run.items), 'item')}: an interval needs at least {ITEMS}."
        return replace(nothing, explanation=explanation)
    limits = limits_of(task.kind, task.metric, *(score.items for score in (*arm, *sound)))
    proportion = task.kind == "proportion"
    nothing = replace(nothing, score=float(run.items.mean()))
    try:
        interval, _ = item_interval(run, alpha, proportion=proportion, limits=limits)
        nothing = replace(nothing, interval=_bounded(interval))
        if not sound:
            return replace(nothing, explanation="No baseline run has this evaluation at this step yet.")
        return _evidence(task, nothing, arm, sound, alpha, loss_margin, limits)
    except ValueError as error:
        return replace(nothing, explanation=str(error))


def _evidence(
    task: TaskScores,
    nothing: ScoreComparison,
    arm: Sequence[RunScore],
    sound: Sequence[RunScore],
    alpha: float,
    loss_margin: float,
    limits: Interval,
) -> TaskEvidence:
    proportion = task.kind == "proportion"
    assert nothing.score is not None
    measured = _measured(task, arm, sound)
    sound = measured.baselines
    band, method = baseline_interval(sound, alpha, proportion=proportion, limits=limits)
    reference = float(np.mean([score.items.mean() for score in sound]))
    margin = task.margin
    if margin is None:
        margin = default_margin(task.kind, task.metric, reference, limits, loss_margin)
    difference = measured.difference
    base = replace(
        nothing,
        method=f"{difference.method}; baseline: {method}",
        baseline_score=reference,
        baseline_interval=_bounded(band),
        inside=None if _bounded(band) is None else band.holds(nothing.score),
        difference=difference.mean,
        margin=margin,
        k_baseline=len(sound),
        identical=difference.identical,
        own=measured.own,
        warnings=measured.warnings,
    )
    return TaskEvidence(
        task=task,
        base=base,
        difference=difference,
        spread=measured.spread,
        prior=measured.prior,
        margin=margin,
        arms=(len(arm), len(sound)),
    )


def _bounded(interval: Interval) -> Interval | None:
    """The interval; None if it has no bounds, because none is reliable."""
    return interval if math.isfinite(interval.low) and math.isfinite(interval.high) else None


def baseline_interval(
    scores: Sequence[RunScore], alpha: float, *, proportion: bool, limits: Interval = UNLIMITED
) -> tuple[Interval, str]:
    """The picture: the interval of a further seed; of one run over its items if seeds are equal or few."""
    means = np.array([float(score.items.mean()) for score in scores])
    if len(means) >= 2 and intervals.has_spread(means):
        inside = Interval(0.0, 1.0) if proportion else limits
        return intervals.prediction(means, alpha, limits=inside), "a further seed, Student-t"
    return item_interval(scores[0], alpha, proportion=proportion, limits=limits)


def _measured(task: TaskScores, arm: Sequence[RunScore], sound: Sequence[RunScore]) -> _Measured:
    """The difference over items, paired where possible, and the spread between seeds.

    Baseline runs far from the other ones are left out, with a warning, as in comparisons of losses.
    """
    common = aligned([*arm, *sound])
    if common is None:
        means = [np.array([float(score.items.mean()) for score in scores]) for scores in (arm, sound)]
        clusters = None
        by_items = float(np.mean([score.items.var() / len(score.items) for score in sound]))
    else:
        items, clusters = common
        means = [arm_items.mean(axis=1) for arm_items in (items[: len(arm)], items[len(arm) :])]
        repeated = own_spread([items[: len(arm)], items[len(arm) :]], clusters)
        by_items = repeated.by_items if repeated else 0.0
    prior = offset_prior(
        task.metric,
        float(np.median(means[1])),
        float(np.median([score.items.std() for score in sound])),
        task.losses,
        task.groups,
    )
    noisy = replace(prior, spread=math.hypot(prior.spread, math.sqrt(by_items)))
    odd = odd_seeds(means[1], noisy)
    if odd:
        rest = [score for index, score in enumerate(sound) if index not in odd]
        names = [sound[index].name or f"number {index + 1}" for index in odd]
        measured = _measured(task, arm, rest)
        return replace(measured, warnings=[*measured.warnings, text.odd_baselines(names)])
    if common is None:
        difference, spread, variance = _of_other_items(task, arm, sound, means)
    else:
        sides = (items[: len(arm)], items[len(arm) :])
        difference = paired(*sides, clusters=clusters, proportion=_is_binary(items))
        spread = own_spread(sides, clusters)
        factor = 1.0 / len(arm) + 1.0 / len(sound)
        variance = 2.0 * float(np.var(sides[0].mean(axis=0) - sides[1].mean(axis=0))) / factor
    own = _own_differences(arm, means[0], difference.mean, noisy)
    if task.same_weights:
        spread = SAME_WEIGHTS
    elif spread is None and task.kind == "proportion":
        spread = public_spread(task.name, variance)
    elif spread is not None and any(mean.left for mean in own):
        # What other groups learn from this one must not come from a run that broke down.
        stayed = [score for score, mean in zip(means[0], own, strict=True) if not mean.left]
        spread = replace(spread, own=variance_of([np.array(stayed), means[1]]))
    return _Measured(
        baselines=sound,
        difference=difference,
        spread=spread or ScoreSpread(source="unknown"),
        prior=prior,
        own=own,
        warnings=[],
    )


def _of_other_items(
    task: TaskScores, arm: Sequence[RunScore], sound: Sequence[RunScore], means: Sequence[Floats]
) -> tuple[ScoreDifference, ScoreSpread | None, float]:
    """The difference of arms whose items cannot be paired, their seed spread, and the variance of items."""
    run, baseline = arm[0], sound[0]
    difference = unpaired(
        run.items[None, :],
        baseline.items[None, :],
        clusters=(run.clusters, baseline.clusters),
        proportion=_is_binary(run.items, baseline.items),
    )
    difference = replace(difference, mean=float(means[0].mean()) - float(means[1].mean()))
    spread = own_spread([scores[:, None] for scores in means])
    return difference, spread, float(run.items.var() + baseline.items.var())


def _is_binary(*items: Floats) -> bool:
    """Return whether all items are 0 or 1, as those of a proportion that was sent as a mean are too."""
    return all(bool(np.isin(item, (0.0, 1.0)).all()) for item in items)


def _own_differences(
    arm: Sequence[RunScore], scores: Floats, difference: float, prior: Prior
) -> list[RunDifference]:
    """Each run's difference; their mean is that of the arms. `prior`: of one score, with its items."""
    shift = difference - float(scores.mean())
    return with_left(
        [
            RunDifference(
                run=score.run,
                name=score.name,
                value=float(value),
                difference=difference if len(arm) == 1 else float(value) + shift,
            )
            for score, value in zip(arm, scores, strict=True)
        ],
        prior,
    )
