"""The three-way verdict on each task of a comparison: equivalent, worse or better, or cannot tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, Prior, odd_seeds, variance_of
from fp8scope_dashboard.analysis.own_differences import RunDifference, with_left
from fp8scope_dashboard.analysis.scores import intervals, quality
from fp8scope_dashboard.analysis.scores.differences import Difference, paired, unpaired
from fp8scope_dashboard.analysis.scores.intervals import UNLIMITED, Interval
from fp8scope_dashboard.analysis.scores.metrics import default_margin, limits_of
from fp8scope_dashboard.analysis.scores.seeds import (
    Group,
    SeedSpread,
    offset_prior,
    own_spread,
    pooled,
    public_spread,
    with_prior,
)
from fp8scope_dashboard.text import score_verdicts as text
from fp8scope_dashboard.text.numbers import count, usable

Floats = NDArray[np.float64]
Verdict = Literal["equivalent", "worse", "better", "cannot_tell"]

# Raise it when results change for the same scores.
METHOD_VERSION = 3
# With fewer items there is no verdict.
ITEMS = 2
# Where the spread between seeds is that of other runs, a run is also equivalent within so many margins: the
# verdict then names that limit.
MARGINS_OF_BORROWED = 2.0
# Identical items with at least so many different values come from the same computation.
VALUES_OF_COMPUTATION = 3


@dataclass(frozen=True)
class Score:
    """One run's evaluation, item by item.

    Attributes:
        items: float64[n]; 0 or 1 each for a proportion.
        item_ids: n names that pair the items of two runs, or None.
        clusters: n names of groups of items that are not independent of each other, or None.
        run, name: id and name of the run, for results and sentences.
    """

    items: Floats
    item_ids: Sequence[str] | None = None
    clusters: Sequence[str] | None = None
    run: str = ""
    name: str = ""


@dataclass(frozen=True)
class Task:
    """The scores of one evaluation: the judged run first, then others of its seed group, and the baseline's.

    Attributes:
        margin: largest difference that counts as none, in the unit of the score; None for the default. With 0
            only identical items are equivalent.
        losses: the prior of the training loss's spread between seeds.
        groups: the project's other groups of seeds on this task.
    """

    name: str
    metric: str
    kind: str
    higher_is_better: bool
    arm: Sequence[Score]
    baselines: Sequence[Score]
    margin: float | None = None
    losses: Prior = PUBLIC
    groups: Sequence[Group] = ()


@dataclass(frozen=True)
class ScoreComparison:
    """The verdict on a score.

    Attributes:
        interval, baseline_interval: at level 1 - alpha, the picture. The baseline's is that of a further
            seed, or of its run over items. None where none is reliable.
        inside: whether the score is in the baseline's interval.
        difference: run - baseline, over the items that all runs have: the means of the two arms.
        difference_interval: the interval that decided, of level `interval_level`: 'worse' and 'better' where
            it excludes 0, 'equivalent' where it is within the margin. None where none is reliable (`doubt`).
        equivalent_within: the limit that an 'equivalent' holds for: the margin, or more (see `judge`).
        p_value: one-sided, of the hypothesis that the run is not worse.
        p_adjusted: to be compared with alpha: for both sides, the tasks (Holm) and the checkpoints.
        tasks: their number; checkpoint: the number of this one; alpha_share: its part of alpha.
        smallest_detectable: harm that this test finds with probability 80 %.
        needs: items, or seeds in each arm, for a difference of the margin; None unless it cannot tell.
        seed_spread: its value, source, number of seeds, and what a project's prior is made of.
        signal_to_noise: score over seed spread.
        identical: every run has the same score on each item.
        doubt: why there is no interval.
        own: the difference of each run, the judged one first; without runs whose items are not finite.
    """

    verdict: Verdict
    explanation: str
    method: str = ""
    method_version: int = METHOD_VERSION
    score: float | None = None
    interval: Interval | None = None
    baseline_score: float | None = None
    baseline_interval: Interval | None = None
    inside: bool | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    interval_level: float | None = None
    margin: float | None = None
    equivalent_within: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    p_better: float | None = None
    tasks: int = 1
    checkpoint: int = 1
    alpha_share: float = 1.0
    smallest_detectable: float | None = None
    needs: dict[str, int | None] | None = None
    seed_spread: dict[str, Any] | None = None
    signal_to_noise: float | None = None
    n: int = 0
    k_run: int = 0
    k_baseline: int = 0
    identical: bool = False
    doubt: str = ""
    own: list[RunDifference] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types; every number is finite."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class _Evidence:
    """A task's difference and seed spread, before the tasks are pooled and adjusted."""

    task: Task
    base: ScoreComparison
    difference: Difference
    spread: SeedSpread
    prior: Prior
    margin: float
    arms: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The difference of a task, with the baselines that took part."""

    baselines: Sequence[Score]
    difference: Difference
    spread: SeedSpread
    prior: Prior
    own: list[RunDifference]
    warnings: list[str]


def item_interval(
    score: Score, alpha: float, *, proportion: bool, exact: bool = False, limits: Interval = UNLIMITED
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


def compare_scores(task: Task, *, alpha: float, loss_margin: float = 0.0025) -> ScoreComparison:
    """The verdict on a single task at a single checkpoint; see `judge`."""
    return judge([task], alpha=alpha, loss_margin=loss_margin)[0]


def judge(
    tasks: Sequence[Task],
    *,
    alpha: float,
    loss_margin: float = 0.0025,
    checkpoint: int = 1,
    alpha_share: float = 1.0,
) -> list[ScoreComparison]:
    """The verdicts on the tasks of one comparison, the same runs at the same step, in their order.

    With d the difference of the arms' means and its error from items and seeds, and a = alpha * alpha_share:
    *equivalent* if the interval of d at level 1 - 2 a is inside +-margin (Schuirmann, 1987); else *worse* or
    *better* if the one-sided p-value, adjusted over the tasks by Holm (1979), is at most a / 2; else
    *cannot tell*. Over the checkpoints, whose shares sum to 1, each error has probability at most alpha: any
    task wrongly 'worse' or 'better' at any checkpoint, and a task wrongly 'equivalent' at any.

    Where the spread between seeds is that of other runs, 'equivalent' may hold for two margins; where the
    items are identical, for what so many items cannot show. `equivalent_within` is that limit.

    If items of a run are NaN or infinite, the verdict is 'worse', without figures. Baseline runs with such
    items, and those of the run's seed group, are left out.

    Args:
        checkpoint: number of this checkpoint of the run, from 1.
        alpha_share: its share of alpha, from `spending.shares`.
    """
    prepared = [_prepare(task, alpha, loss_margin) for task in tasks]
    evidence = [each for each in prepared if isinstance(each, _Evidence)]
    spreads = pooled([each.spread for each in evidence])
    finished = [_with_seeds(each, spread) for each, spread in zip(evidence, spreads, strict=True)]
    share = alpha * alpha_share
    worse = _family([_p_worse(each) for each in finished], share / 2.0)
    better = _family([_p_better(each) for each in finished], share / 2.0)
    verdicts = iter(
        _verdict(each, _Levels(below, above, share, alpha), len(finished), checkpoint)
        for each, below, above in zip(finished, worse, better, strict=True)
    )
    return [next(verdicts) if isinstance(each, _Evidence) else each for each in prepared]


@dataclass(frozen=True)
class _Levels:
    """The one-sided levels at which a task is tested: for 'worse', for 'better', and for 'equivalent'."""

    worse: float
    better: float
    equivalent: float
    alpha: float


def _family(p_values: Sequence[float], level: float) -> list[float]:
    """The level of each task's test in Holm's procedure: that of its rank if the ones before are rejected.

    A task is rejected by `holm` just where its p-value is at most this level.
    """
    order = np.argsort(p_values, kind="stable")
    levels = [0.0] * len(p_values)
    rank = 0
    for place, index in enumerate(order):
        levels[index] = level / (len(p_values) - rank)
        if p_values[index] <= levels[index] and rank == place:
            rank += 1
    return levels


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family (Holm, 1979): rejecting those up to alpha errs anywhere with <= alpha."""
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _prepare(task: Task, alpha: float, loss_margin: float) -> _Evidence | ScoreComparison:
    """The evidence on a task, or the verdict if there is not enough."""
    run = task.arm[0]
    sound = [score for score in task.baselines if len(score.items) >= ITEMS and usable(score.items).all()]
    arm = [score for score in task.arm if len(score.items) >= ITEMS and usable(score.items).all()]
    nothing = ScoreComparison("cannot_tell", "", n=len(run.items), k_run=len(arm), k_baseline=len(sound))
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
    task: Task,
    nothing: ScoreComparison,
    arm: Sequence[Score],
    sound: Sequence[Score],
    alpha: float,
    loss_margin: float,
    limits: Interval,
) -> _Evidence:
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
    return _Evidence(task, base, difference, measured.spread, measured.prior, margin, (len(arm), len(sound)))


def _bounded(interval: Interval) -> Interval | None:
    """The interval; None if it has no bounds, because none is reliable."""
    return interval if math.isfinite(interval.low) and math.isfinite(interval.high) else None


def baseline_interval(
    scores: Sequence[Score], alpha: float, *, proportion: bool, limits: Interval = UNLIMITED
) -> tuple[Interval, str]:
    """The picture: the interval of a further seed; of one run over its items if seeds are equal or few."""
    means = np.array([float(score.items.mean()) for score in scores])
    if len(means) >= 2 and intervals.has_spread(means):
        inside = Interval(0.0, 1.0) if proportion else limits
        return intervals.prediction(means, alpha, limits=inside), "a further seed, Student-t"
    return item_interval(scores[0], alpha, proportion=proportion, limits=limits)


def _measured(task: Task, arm: Sequence[Score], sound: Sequence[Score]) -> _Measured:
    """The difference over items, paired where possible, and the spread between seeds.

    Baseline runs far from the other ones are left out, with a warning, as in comparisons of losses.
    """
    aligned = _aligned([*arm, *sound])
    if aligned is None:
        means = [np.array([float(score.items.mean()) for score in each]) for each in (arm, sound)]
        clusters = None
        by_items = float(np.mean([each.items.var() / len(each.items) for each in sound]))
    else:
        items, clusters = aligned
        means = [each.mean(axis=1) for each in (items[: len(arm)], items[len(arm) :])]
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
    if aligned is None:
        difference, spread, variance = _of_other_items(task, arm, sound, means)
    else:
        sides = (items[: len(arm)], items[len(arm) :])
        difference = paired(*sides, clusters=clusters, proportion=_is_binary(items))
        spread = own_spread(sides, clusters)
        factor = 1.0 / len(arm) + 1.0 / len(sound)
        variance = 2.0 * float(np.var(sides[0].mean(axis=0) - sides[1].mean(axis=0))) / factor
    own = _own_differences(arm, means[0], difference.mean, noisy)
    if spread is None and task.kind == "proportion":
        spread = public_spread(task.name, variance)
    elif spread is not None and any(each.left for each in own):
        # What other groups learn from this one must not come from a run that broke down.
        stayed = [score for score, each in zip(means[0], own, strict=True) if not each.left]
        spread = replace(spread, own=variance_of([np.array(stayed), means[1]]))
    return _Measured(
        baselines=sound,
        difference=difference,
        spread=spread or SeedSpread("unknown"),
        prior=prior,
        own=own,
        warnings=[],
    )


def _of_other_items(
    task: Task, arm: Sequence[Score], sound: Sequence[Score], means: Sequence[Floats]
) -> tuple[Difference, SeedSpread | None, float]:
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
    """Whether all items are 0 or 1, as those of a proportion that was sent as a mean are too."""
    return all(bool(np.isin(each, (0.0, 1.0)).all()) for each in items)


def _own_differences(
    arm: Sequence[Score], scores: Floats, difference: float, prior: Prior
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


def _aligned(scores: Sequence[Score]) -> tuple[Floats, Sequence[str] | None] | None:
    """Items float64[K, n] that all scores have, and their clusters; None if they cannot be paired.

    Pairs by name. Without names, by position if all have the same number of items: any fixed pairing gives a
    valid error, and the right order a smaller one.

    Raises:
        ValueError: if names are given, but one of them repeats, or fewer than two are in common.
    """
    if all(score.item_ids is not None for score in scores):
        for score in scores:
            _check_ids(score.item_ids or ())
        positions = [{name: i for i, name in enumerate(score.item_ids or ())} for score in scores]
        common = [name for name in positions[0] if all(name in each for each in positions[1:])]
        if len(common) < ITEMS:
            raise ValueError("The run and its baseline have fewer than two evaluation items in common.")
        items = np.stack(
            [score.items[[at[name] for name in common]] for score, at in zip(scores, positions, strict=True)]
        )
        return items, _clusters_of(scores, positions, common)
    if len({len(score.items) for score in scores}) > 1:
        return None
    clusters = next((score.clusters for score in scores if score.clusters is not None), None)
    return np.stack([score.items for score in scores]), clusters


def _check_ids(names: Sequence[str]) -> None:
    """Raise ValueError if names of items repeat: it is not known then which ones are pairs."""
    repeated = len(names) - len(set(names))
    if repeated:
        raise ValueError(
            f"{count(repeated, 'item id')} of {len(names):,} "
            f"{'repeats' if repeated == 1 else 'repeat'} an earlier one, so items cannot be paired. Give "
            "each item its own id, and each filter of a task an evaluation of its own."
        )


def _clusters_of(
    scores: Sequence[Score], positions: Sequence[Mapping[str, int]], names: Sequence[str]
) -> Sequence[str] | None:
    """The clusters of the named items, from the first score that has clusters."""
    for score, at in zip(scores, positions, strict=True):
        if score.clusters is not None:
            return [score.clusters[at[name]] for name in names]
    return None


def _with_seeds(each: _Evidence, spread: SeedSpread) -> _Evidence:
    spread = with_prior(spread, each.prior)
    further, noise = spread.added_variance(*each.arms)
    difference = each.difference.with_further(further, noise, borrowed=spread.borrowed)
    return replace(each, difference=difference, spread=spread)


def _p_worse(each: _Evidence) -> float:
    return each.difference.p_below() if each.task.higher_is_better else each.difference.p_above()


def _p_better(each: _Evidence) -> float:
    return each.difference.p_above() if each.task.higher_is_better else each.difference.p_below()


def _verdict(each: _Evidence, levels: _Levels, tasks: int, checkpoint: int) -> ScoreComparison:
    difference = each.difference
    if difference.identical:
        decided = _identical(each, levels.equivalent)
    elif difference.doubt:
        decided = replace(each.base, doubt=difference.doubt)
    else:
        decided = _decided(each, levels)
    decided = replace(
        decided,
        tasks=tasks,
        checkpoint=checkpoint,
        alpha_share=levels.equivalent / levels.alpha,
        seed_spread=_as_dict(each.spread),
        signal_to_noise=quality.signal_to_noise(each.base.baseline_score or 0.0, each.spread.value),
    )
    facts = text.Facts(decided.as_dict(), each.task.kind == "proportion", levels.alpha)
    return replace(decided, explanation=text.explain(facts))


def _decided(each: _Evidence, levels: _Levels) -> ScoreComparison:
    """The verdict from the interval: at the level for 'equivalent', else at those of the two sides."""
    difference, margin = each.difference, each.margin
    narrow = difference.interval(2.0 * levels.equivalent)
    limits = [margin] + ([MARGINS_OF_BORROWED * margin] if each.spread.borrowed else [])
    within = next((limit for limit in limits if -limit < narrow.low and narrow.high < limit), None)
    reach = difference.reference.quantile(levels.worse)
    power = -difference.reference.quantile(intervals.POWER)
    result = replace(
        each.base,
        p_value=_p_worse(each),
        p_adjusted=min(1.0, _p_worse(each) / levels.worse * levels.alpha),
        p_better=_p_better(each),
        smallest_detectable=_detectable(difference, levels.worse, reach, power),
    )
    if within is not None:
        return replace(
            result,
            verdict="equivalent",
            difference_interval=narrow,
            interval_level=1.0 - 2.0 * levels.equivalent,
            equivalent_within=within,
        )
    sides = (levels.better, levels.worse) if each.task.higher_is_better else (levels.worse, levels.better)
    interval = difference.bounds(*sides)
    result = replace(result, difference_interval=interval, interval_level=1.0 - levels.worse - levels.better)
    if interval.low > 0.0 or interval.high < 0.0:
        is_better = (interval.low > 0.0) == each.task.higher_is_better
        return replace(result, verdict="better" if is_better else "worse")
    needs = quality.needs_for(
        margin,
        variance=difference.error**2 - difference.further,
        units=difference.units,
        further=difference.further,
        runs=min(each.arms),
        critical=reach,
    )
    return replace(result, needs=asdict(needs))


def _detectable(difference: Difference, level: float, reach: float, power: float) -> float:
    """The harm that a test of this one-sided level finds with probability POWER."""
    if difference.borrowed:
        return (reach + power) * difference.error
    return intervals.smallest_detectable(difference.error, level, difference.total_freedom, one_sided=True)


def _identical(each: _Evidence, level: float) -> ScoreComparison:
    """'Equivalent', for runs that agree on each item.

    Scores with several values agree only if the runs compute the same. Equal answers of yes and no show that
    at most a part of all items differs, the largest share that so many items would not have shown.
    """
    difference = each.difference.with_further(0.0, 0.0)
    result = replace(
        each.base,
        verdict="equivalent",
        equivalent_within=each.margin,
        p_value=1.0,
        p_adjusted=1.0,
        p_better=1.0,
    )
    if len(np.unique(each.task.arm[0].items)) >= VALUES_OF_COMPUTATION or difference.span == 0.0:
        return result
    interval = difference.interval(2.0 * level)
    return replace(
        result,
        difference_interval=interval,
        interval_level=1.0 - 2.0 * level,
        equivalent_within=max(each.margin, interval.high),
    )


def _as_dict(spread: SeedSpread) -> dict[str, Any]:
    """The stored facts about a spread; `own` and `by_items` are what the project's prior is made of."""
    return {
        "value": spread.value,
        "source": spread.source,
        "seeds": spread.seeds,
        "benchmark": spread.benchmark,
        "own": list(spread.own),
        "by_items": spread.by_items,
    }
