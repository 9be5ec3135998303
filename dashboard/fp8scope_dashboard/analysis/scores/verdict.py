"""The three-way verdict on each task of a comparison: equivalent, worse or better, or cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fp8scope_dashboard.analysis.scores import intervals, quality
from fp8scope_dashboard.analysis.scores.differences import ScoreDifference
from fp8scope_dashboard.analysis.scores.evidence import TaskEvidence, prepare
from fp8scope_dashboard.analysis.scores.result import ScoreComparison, TaskScores
from fp8scope_dashboard.analysis.scores.seeds import ScoreSpread, pooled, with_prior
from fp8scope_dashboard.text import score_verdicts as text

# Where the spread between seeds is that of other runs, a run is also equivalent within so many margins: the
# verdict then names that limit.
MARGINS_OF_BORROWED = 2.0
# Identical items with at least so many different values come from the same computation.
VALUES_OF_COMPUTATION = 3


def compare_scores(task: TaskScores, *, alpha: float, loss_margin: float = 0.0025) -> ScoreComparison:
    """The verdict on a single task at a single checkpoint; see `judge`."""
    return judge([task], alpha=alpha, loss_margin=loss_margin)[0]


def judge(
    tasks: Sequence[TaskScores],
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
    prepared = [prepare(task, alpha, loss_margin) for task in tasks]
    evidence = [item for item in prepared if isinstance(item, TaskEvidence)]
    spreads = pooled([item.spread for item in evidence])
    finished = [_with_seeds(item, spread) for item, spread in zip(evidence, spreads, strict=True)]
    share = alpha * alpha_share
    worse = _family([_p_worse(item) for item in finished], share / 2.0)
    better = _family([_p_better(item) for item in finished], share / 2.0)
    verdicts = iter(
        _verdict(item, _Levels(below, above, share, alpha), len(finished), checkpoint)
        for item, below, above in zip(finished, worse, better, strict=True)
    )
    return [next(verdicts) if isinstance(item, TaskEvidence) else item for item in prepared]


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
    for position, index in enumerate(order):
        levels[index] = level / (len(p_values) - rank)
        if p_values[index] <= levels[index] and rank == position:
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


def _with_seeds(evidence: TaskEvidence, spread: ScoreSpread) -> TaskEvidence:
    spread = with_prior(spread, evidence.prior)
    further, noise = spread.added_variance(*evidence.arms)
    difference = evidence.difference.with_further(further, noise, borrowed=spread.borrowed)
    return replace(evidence, difference=difference, spread=spread)


def _p_worse(evidence: TaskEvidence) -> float:
    return evidence.difference.p_below() if evidence.task.higher_is_better else evidence.difference.p_above()


def _p_better(evidence: TaskEvidence) -> float:
    return evidence.difference.p_above() if evidence.task.higher_is_better else evidence.difference.p_below()


def _verdict(evidence: TaskEvidence, levels: _Levels, tasks: int, checkpoint: int) -> ScoreComparison:
    difference = evidence.difference
    if difference.identical:
        decided = _identical(evidence, levels.equivalent)
    elif difference.doubt:
        decided = replace(evidence.base, doubt=difference.doubt)
    else:
        decided = _decided(evidence, levels)
    decided = replace(
        decided,
        tasks=tasks,
        checkpoint=checkpoint,
        alpha_share=levels.equivalent / levels.alpha,
        seed_spread=_as_dict(evidence.spread),
        signal_to_noise=quality.signal_to_noise(evidence.base.baseline_score or 0.0, evidence.spread.value),
    )
    facts = text.ScoreFacts(decided.as_dict(), evidence.task.kind == "proportion", levels.alpha)
    return replace(decided, explanation=text.explain(facts))


def _decided(evidence: TaskEvidence, levels: _Levels) -> ScoreComparison:
    """The verdict from the interval: at the level for 'equivalent', else at those of the two sides."""
    difference, margin = evidence.difference, evidence.margin
    narrow = difference.interval(2.0 * levels.equivalent)
    limits = [margin] + ([MARGINS_OF_BORROWED * margin] if evidence.spread.borrowed else [])
    within = next((limit for limit in limits if -limit < narrow.low and narrow.high < limit), None)
    reach = difference.reference.quantile(levels.worse)
    power = -difference.reference.quantile(intervals.POWER)
    result = replace(
        evidence.base,
        p_value=_p_worse(evidence),
        p_adjusted=min(1.0, _p_worse(evidence) / levels.worse * levels.alpha),
        p_better=_p_better(evidence),
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
    sides = (levels.better, levels.worse) if evidence.task.higher_is_better else (levels.worse, levels.better)
    interval = difference.bounds(*sides)
    result = replace(result, difference_interval=interval, interval_level=1.0 - levels.worse - levels.better)
    if interval.low > 0.0 or interval.high < 0.0:
        is_better = (interval.low > 0.0) == evidence.task.higher_is_better
        return replace(result, verdict="better" if is_better else "worse")
    needs = quality.required_sample(
        margin,
        variance=difference.error**2 - difference.further,
        units=difference.units,
        further=difference.further,
        runs=min(evidence.arms),
        critical=reach,
    )
    if evidence.task.same_weights:
        needs = replace(needs, seeds=None)
    return replace(result, needs=asdict(needs))


def _detectable(difference: ScoreDifference, level: float, reach: float, power: float) -> float:
    """The harm that a test of this one-sided level finds with probability POWER."""
    if difference.borrowed:
        return (reach + power) * difference.error
    return intervals.smallest_detectable(difference.error, level, difference.total_freedom, one_sided=True)


def _identical(evidence: TaskEvidence, level: float) -> ScoreComparison:
    """'Equivalent', for runs that agree on each item.

    Scores with several values agree only if the runs compute the same. Equal answers of yes and no show that
    at most a part of all items differs, the largest share that so many items would not have shown.
    """
    difference = evidence.difference.with_further(0.0, 0.0)
    result = replace(
        evidence.base,
        verdict="equivalent",
        equivalent_within=evidence.margin,
        p_value=1.0,
        p_adjusted=1.0,
        p_better=1.0,
    )
    if len(np.unique(evidence.task.arm[0].items)) >= VALUES_OF_COMPUTATION or difference.span == 0.0:
        return result
    interval = difference.interval(2.0 * level)
    return replace(
        result,
        difference_interval=interval,
        interval_level=1.0 - 2.0 * level,
        equivalent_within=max(evidence.margin, interval.high),
    )


def _as_dict(spread: ScoreSpread) -> dict[str, Any]:
    """The stored facts about a spread; `own` and `by_items` are what the project's prior is made of."""
    return {
        "value": spread.value,
        "source": spread.source,
        "seeds": spread.seeds,
        "benchmark": spread.benchmark,
        "own": list(spread.own),
        "by_items": spread.by_items,
    }
