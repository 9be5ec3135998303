"""The three-way verdict on each task of a comparison: equivalent, worse or better, or cannot tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.scores import intervals, quality
from fp8scope_dashboard.analysis.scores.differences import Difference, paired, unpaired
from fp8scope_dashboard.analysis.scores.intervals import UNLIMITED, Interval
from fp8scope_dashboard.analysis.scores.metrics import default_margin, limits_of
from fp8scope_dashboard.analysis.scores.seeds import SeedSpread, own_spread, pooled, public_spread
from fp8scope_dashboard.text import score_verdicts as text
from fp8scope_dashboard.text.numbers import count, usable

Floats = NDArray[np.float64]
Verdict = Literal["equivalent", "worse", "better", "cannot_tell"]

# Raise it when results change for the same scores.
METHOD_VERSION = 2
# With fewer items there is no verdict.
ITEMS = 2


@dataclass(frozen=True)
class Score:
    """One run's evaluation, item by item.

    Attributes:
        items: float64[n]; 0 or 1 each for a proportion.
        item_ids: n names that pair the items of two runs, or None.
        clusters: n names of groups of items that are not independent of each other, or None.
    """

    items: Floats
    item_ids: Sequence[str] | None = None
    clusters: Sequence[str] | None = None


@dataclass(frozen=True)
class Task:
    """The scores of one evaluation: the judged run first, then others of its seed group, and the baseline's.

    Attributes:
        margin: largest difference that counts as none, in the unit of the score; None for the default.
    """

    name: str
    metric: str
    kind: str
    higher_is_better: bool
    arm: Sequence[Score]
    baselines: Sequence[Score]
    margin: float | None = None


@dataclass(frozen=True)
class ScoreComparison:
    """The verdict on a score.

    Attributes:
        interval, baseline_interval: at level 1 - alpha, the picture. The baseline's is that of a further
            seed, or of its run over items.
        inside: whether the score is in the baseline's interval.
        difference: run - baseline, over the items that all runs have.
        difference_interval: at level 1 - 2 alpha, which corresponds to one-sided tests at alpha.
        p_value: one-sided, of the hypothesis that the run is not worse; adjusted in `p_adjusted` (Holm) for
            the number of tasks, `tasks`.
        smallest_detectable: harm that the test at alpha finds with probability 80 %.
        needs: items, or seeds in each arm, for a difference of the margin; None unless it cannot tell.
        seed_spread: its value, source and number of seeds.
        signal_to_noise: score over seed spread.
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
    margin: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    p_better: float | None = None
    tasks: int = 1
    smallest_detectable: float | None = None
    needs: dict[str, int | None] | None = None
    seed_spread: dict[str, Any] | None = None
    signal_to_noise: float | None = None
    n: int = 0
    k_run: int = 0
    k_baseline: int = 0
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
    margin: float
    arms: tuple[int, int]


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
    """The verdict on a single task; see `judge`."""
    return judge([task], alpha=alpha, loss_margin=loss_margin)[0]


def judge(tasks: Sequence[Task], *, alpha: float, loss_margin: float = 0.0025) -> list[ScoreComparison]:
    """The verdicts on the tasks of one comparison, the same runs at the same step, in their order.

    With d the difference of the arms' means and its error from items and seeds:
    *equivalent* if the interval of d at level 1 - 2 alpha is inside +-margin (Schuirmann, 1987); else *worse*
    or *better* if the one-sided p-value, adjusted over the tasks by Holm (1979), is at most alpha; else
    *cannot tell*. Each error has probability at most alpha: any task wrongly 'worse', any wrongly 'better',
    and a task wrongly 'equivalent'.

    If items of a run are NaN or infinite, the verdict is 'worse', without figures. Baseline runs with such
    items, and those of the run's seed group, are left out.
    """
    prepared = [_prepare(task, alpha, loss_margin) for task in tasks]
    evidence = [each for each in prepared if isinstance(each, _Evidence)]
    spreads = pooled([each.spread for each in evidence])
    finished = [_with_seeds(each, spread) for each, spread in zip(evidence, spreads, strict=True)]
    worse = holm([_p_worse(each) for each in finished])
    better = holm([_p_better(each) for each in finished])
    verdicts = iter(
        _verdict(each, p_worse, p_better, alpha, len(finished))
        for each, p_worse, p_better in zip(finished, worse, better, strict=True)
    )
    return [next(verdicts) if isinstance(each, _Evidence) else each for each in prepared]


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
    try:
        interval, _ = item_interval(run, alpha, proportion=proportion, limits=limits)
        nothing = replace(nothing, score=float(run.items.mean()), interval=interval)
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
    band, method = baseline_interval(sound, alpha, proportion=proportion, limits=limits)
    assert nothing.score is not None
    difference, spread = _difference(task, arm, sound)
    reference = float(np.mean([score.items.mean() for score in sound]))
    margin = task.margin or default_margin(task.kind, task.metric, reference, limits, loss_margin)
    base = replace(
        nothing,
        method=f"{difference.method}; baseline: {method}",
        baseline_score=reference,
        baseline_interval=band,
        inside=band.holds(nothing.score),
        difference=difference.mean,
        margin=margin,
    )
    return _Evidence(task, base, difference, spread, margin, (len(arm), len(sound)))


def baseline_interval(
    scores: Sequence[Score], alpha: float, *, proportion: bool, limits: Interval = UNLIMITED
) -> tuple[Interval, str]:
    """The picture: the interval of a further seed; of one run over its items if seeds are equal or few."""
    means = np.array([float(score.items.mean()) for score in scores])
    if len(means) >= 2 and intervals.has_spread(means):
        inside = Interval(0.0, 1.0) if proportion else limits
        return intervals.prediction(means, alpha, limits=inside), "a further seed, Student-t"
    return item_interval(scores[0], alpha, proportion=proportion, limits=limits)


def _difference(task: Task, arm: Sequence[Score], sound: Sequence[Score]) -> tuple[Difference, SeedSpread]:
    """The difference over items, paired where possible, and the spread between seeds."""
    proportion = task.kind == "proportion"
    everyone = [*arm, *sound]
    aligned = _aligned(everyone)
    if aligned is None:
        run, baseline = arm[0], sound[0]
        sides = (run.items[None, :], baseline.items[None, :])
        difference = unpaired(*sides, clusters=(run.clusters, baseline.clusters), proportion=proportion)
        run_scores = [np.array([float(each.items.mean()) for each in side]) for side in (arm, sound)]
        means = [float(scores.mean()) for scores in run_scores]
        difference = replace(difference, mean=means[0] - means[1])
        spread = own_spread([scores[:, None] for scores in run_scores])
        variance = float(run.items.var() + baseline.items.var())
    else:
        items, clusters = aligned
        sides = (items[: len(arm)], items[len(arm) :])
        difference = paired(*sides, clusters=clusters, proportion=proportion)
        spread = own_spread(sides, clusters)
        factor = 1.0 / len(arm) + 1.0 / len(sound)
        variance = 2.0 * float(np.var(sides[0].mean(axis=0) - sides[1].mean(axis=0))) / factor
    if spread is None and proportion:
        spread = public_spread(task.name, variance)
    return difference, spread or SeedSpread("unknown")


def _aligned(scores: Sequence[Score]) -> tuple[Floats, Sequence[str] | None] | None:
    """Items float64[K, n] that all scores have, and their clusters; None if they cannot be paired.

    Pairs by name. Without names, by position if all have the same number of items: any fixed pairing gives a
    valid error, and the right order a smaller one.

    Raises:
        ValueError: if names are given, but fewer than two are in common.
    """
    if all(score.item_ids is not None for score in scores):
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


def _clusters_of(
    scores: Sequence[Score], positions: Sequence[Mapping[str, int]], names: Sequence[str]
) -> Sequence[str] | None:
    """The clusters of the named items, from the first score that has clusters."""
    for score, at in zip(scores, positions, strict=True):
        if score.clusters is not None:
            return [score.clusters[at[name]] for name in names]
    return None


def _with_seeds(each: _Evidence, spread: SeedSpread) -> _Evidence:
    further, noise = spread.added_variance(*each.arms)
    return replace(each, difference=each.difference.with_further(further, noise), spread=spread)


def _p_worse(each: _Evidence) -> float:
    return each.difference.p_below() if each.task.higher_is_better else each.difference.p_above()


def _p_better(each: _Evidence) -> float:
    return each.difference.p_above() if each.task.higher_is_better else each.difference.p_below()


def _verdict(each: _Evidence, p_worse: float, p_better: float, alpha: float, tasks: int) -> ScoreComparison:
    difference, margin = each.difference, each.margin
    interval = difference.interval(2.0 * alpha)
    verdict: Verdict = "cannot_tell"
    if -margin < interval.low and interval.high < margin:
        verdict = "equivalent"
    elif p_worse <= alpha:
        verdict = "worse"
    elif p_better <= alpha:
        verdict = "better"
    detectable = intervals.smallest_detectable(
        difference.error, alpha, difference.total_freedom, one_sided=True
    )
    needs = None
    if verdict == "cannot_tell":
        needs = quality.needs_for(
            margin,
            variance=difference.error**2 - difference.further,
            units=difference.units,
            further=difference.further,
            runs=min(each.arms),
            critical=intervals.quantile(2.0 * alpha, difference.total_freedom),
        )
    result = replace(
        each.base,
        verdict=verdict,
        difference_interval=interval,
        p_value=_p_worse(each),
        p_adjusted=p_worse,
        p_better=_p_better(each),
        tasks=tasks,
        smallest_detectable=detectable,
        needs=None if needs is None else asdict(needs),
        seed_spread={
            "value": each.spread.value,
            "source": each.spread.source,
            "seeds": each.spread.seeds,
            "benchmark": each.spread.benchmark,
        },
        signal_to_noise=quality.signal_to_noise(each.base.baseline_score or 0.0, each.spread.value),
    )
    in_percent = each.task.kind == "proportion"
    facts = text.Facts(result.as_dict(), in_percent, alpha)
    return replace(result, explanation=text.explain(facts))
