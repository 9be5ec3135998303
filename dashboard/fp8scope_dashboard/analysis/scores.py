"""Whether a score is inside its baseline's interval, and the smallest difference that could be found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis import intervals
from fp8scope_dashboard.analysis.differences import Difference, paired, unpaired
from fp8scope_dashboard.analysis.intervals import Interval
from fp8scope_dashboard.text import verdicts
from fp8scope_dashboard.text.numbers import count, usable

Floats = NDArray[np.float64]
Verdict = Literal["inside", "above", "below", "insufficient"]

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
class ScoreComparison:
    """The verdict on a score. Intervals are at level 1 - alpha; `difference` is run - baseline."""

    verdict: Verdict
    explanation: str
    method: str = ""
    score: float | None = None
    interval: Interval | None = None
    baseline_score: float | None = None
    baseline_interval: Interval | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    p_value: float | None = None
    smallest_detectable: float | None = None
    n: int = 0
    k_baseline: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types; every number is finite."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }


def item_interval(
    score: Score, alpha: float, *, proportion: bool, exact: bool = False
) -> tuple[Interval, str]:
    """One run's interval over its items, and the name of the method.

    Clustered standard errors for clustered items. Otherwise Wilson for proportions (Clopper-Pearson if
    `exact`) and the central limit theorem for means.
    """
    if score.clusters is not None:
        return intervals.mean_interval(score.items, alpha, score.clusters), "clustered standard error"
    if not proportion:
        return intervals.mean_interval(score.items, alpha), "central limit theorem"
    successes, n = int(score.items.sum()), len(score.items)
    if exact:
        return intervals.clopper_pearson(successes, n, alpha), "Clopper-Pearson"
    return intervals.wilson(successes, n, alpha), "Wilson"


def compare_scores(
    run: Score,
    baselines: Sequence[Score],
    *,
    proportion: bool,
    alpha: float,
    exact: bool = False,
    higher_is_better: bool = True,
) -> ScoreComparison:
    """Compare one run's score with its baseline's interval.

    With two or more baseline seeds, the interval is the prediction interval of a further seed (Student-t).
    With one baseline run, or with seeds that all have the same score, it is that run's interval over its
    items, which does not include the spread between seeds.

    If items of the run are NaN or infinite, the verdict is the worse side, without figures. Baseline runs
    with such items are left out.
    """
    sound = [score for score in baselines if len(score.items) >= ITEMS and usable(score.items).all()]
    nothing = ScoreComparison("insufficient", "", n=len(run.items), k_baseline=len(sound))
    broken = int(np.count_nonzero(~usable(run.items)))
    if broken:
        return replace(
            nothing,
            verdict="below" if higher_is_better else "above",
            method="score not finite",
            explanation=f"{broken} of {count(len(run.items), 'item')} scored NaN or infinite.",
        )
    if len(run.items) < ITEMS:
        return replace(
            nothing, explanation=f"{count(len(run.items), 'item')}: an interval needs at least {ITEMS}."
        )
    try:
        interval, _ = item_interval(run, alpha, proportion=proportion, exact=exact)
    except ValueError as error:
        return replace(nothing, explanation=str(error))
    nothing = replace(nothing, score=float(run.items.mean()), interval=interval)
    if not sound:
        return replace(nothing, explanation="No baseline run has this evaluation at this step yet.")
    scores = np.array([float(score.items.mean()) for score in sound])
    try:
        if len(scores) >= 2 and float(np.std(scores)) > 0.0:
            return _against_seeds(nothing, scores, alpha)
        return _against_items(nothing, run, sound[0], proportion, alpha, exact)
    except ValueError as error:
        return replace(nothing, explanation=str(error))


def _against_seeds(nothing: ScoreComparison, scores: Floats, alpha: float) -> ScoreComparison:
    assert nothing.score is not None
    seeds = len(scores)
    reference = float(scores.mean())
    band = intervals.prediction(scores, alpha)
    error = float(np.std(scores, ddof=1)) * math.sqrt(1.0 + 1.0 / seeds)
    difference = nothing.score - reference
    return _with_verdict(
        replace(
            nothing,
            method="Student-t over seeds, interval of a further seed",
            baseline_score=reference,
            baseline_interval=band,
            difference=difference,
            difference_interval=intervals.around(difference, band.high - reference),
            p_value=intervals.two_sided(difference, error, seeds - 1),
            smallest_detectable=intervals.smallest_detectable(error, alpha, seeds - 1),
        )
    )


def _against_items(
    nothing: ScoreComparison, run: Score, baseline: Score, proportion: bool, alpha: float, exact: bool
) -> ScoreComparison:
    band, method = item_interval(baseline, alpha, proportion=proportion, exact=exact)
    difference = _difference(run, baseline, proportion, alpha)
    return _with_verdict(
        replace(
            nothing,
            method=f"{method}; {difference.method}",
            baseline_score=float(baseline.items.mean()),
            baseline_interval=band,
            difference=difference.difference,
            difference_interval=difference.interval,
            p_value=difference.p_value,
            smallest_detectable=intervals.smallest_detectable(difference.error, alpha),
        )
    )


def _difference(run: Score, baseline: Score, proportion: bool, alpha: float) -> Difference:
    """Paired over the items that both have if the items have ids, else unpaired."""
    if run.item_ids is None or baseline.item_ids is None:
        clusters = (run.clusters, baseline.clusters)
        return unpaired(run.items, baseline.items, alpha, clusters=clusters, proportion=proportion)
    index_of = {name: i for i, name in enumerate(baseline.item_ids)}
    pairs = [(i, index_of[name]) for i, name in enumerate(run.item_ids) if name in index_of]
    if len(pairs) < ITEMS:
        raise ValueError("The run and its baseline have fewer than two evaluation items in common.")
    ours, theirs = (np.array(side) for side in zip(*pairs, strict=True))
    clusters_in_common = None if run.clusters is None else [run.clusters[i] for i in ours]
    return paired(
        run.items[ours], baseline.items[theirs], alpha, clusters=clusters_in_common, proportion=proportion
    )


def _with_verdict(result: ScoreComparison) -> ScoreComparison:
    """The comparison with its verdict and explanation, from the score and the baseline's interval."""
    band = result.baseline_interval
    assert result.score is not None and band is not None and result.smallest_detectable is not None
    verdict: Verdict = (
        "inside" if band.holds(result.score) else "above" if result.score > band.high else "below"
    )
    explanation = verdicts.score_against_baseline(
        result.score, verdict, band, result.k_baseline, result.smallest_detectable, intervals.POWER
    )
    return replace(result, verdict=verdict, explanation=explanation)
