"""The spread of a score between runs that differ only in their seed, beyond what their items explain.

The score of a run is the mean of its items plus an offset of the run. Two runs differ in single items, which
the variance over items of their paired difference contains already. A comparison has to add the offset.

One or two runs do not show the spread of the offset. As for losses (`analysis.losses.seeds`), it is shrunk
towards a prior: that of public runs, with the project's other groups. So one run in each arm has one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import scipy

from fp8scope_dashboard.analysis.losses.seeds import MAX_FREEDOM, PUBLIC, PUBLIC_NATS, Prior, shrunk
from fp8scope_dashboard.analysis.scores.intervals import ROUNDING, cluster_index
from fp8scope_dashboard.analysis.scores.metrics import is_loss, is_perplexity
from fp8scope_dashboard.analysis.scores.public_spreads import SEEDS, spread_of
from fp8scope_dashboard.statistics.arrays import Floats

Source = Literal["own", "project", "public", "unknown", "none"]
# The prior of the offset for metrics that are no loss, in standard deviations of the items, and its degrees
# of freedom. For a share of 50 % that is 0.3 points. Chosen, not fitted: of the eight benchmarks of
# `public_spreads` five spread by no more than their items explain, and three by 0.5 to 1.5 points more.
OFFSET_IN_ITEMS: Final = 0.006
OFFSET_FREEDOM: Final = 3.0
# Losses below this have no relative spread; as in `analysis.losses.verdict`.
NATS_FROM_ZERO: Final = 0.02
# Size of the test by which a task's seeds spread more than those of the other tasks.
OUTLYING = 0.05


@dataclass(frozen=True, kw_only=True)
class ScoreSpread:
    """The spread of a score between seeds.

    Attributes:
        value: standard deviation of the score of one run; None if unknown.
        variance: the same squared, as used; pooling over tasks may change it.
        by_items: variance of the score that differences in single items explain.
        freedom: degrees of freedom of `variance`.
        seeds: runs that it comes from.
        benchmark: the name in the table of public spreads.
        own: the own seeds' variance before it was shrunk and pooled, and its degrees of freedom; 0 without.
    """

    source: Source
    value: float | None = None
    variance: float = 0.0
    by_items: float = 0.0
    freedom: float = float("inf")
    seeds: int = 0
    benchmark: str = ""
    own: tuple[float, float] = (0.0, 0.0)

    @property
    def borrowed(self) -> bool:
        """Return whether it is that of other runs only."""
        return self.source in ("project", "public")

    def added_variance(self, run: int, baseline: int) -> tuple[float, float]:
        """Variance of the difference between two arms' means beyond that over items, and its noise.

        (1/K + 1/K') max(0, s^2 - e), with e the part of s^2 that items explain. The noise, for
        Satterthwaite's rule, is that of all of s^2 although only its excess over e is added: by chance s^2
        is small just where the error is underestimated.
        """
        factor = 1.0 / run + 1.0 / baseline
        excess = max(0.0, self.variance - self.by_items)
        return factor * excess, (factor * self.variance) ** 2 / self.freedom


SAME_WEIGHTS: Final = ScoreSpread(source="none", value=0.0)
"""Of two evaluations of the same weights: nothing between them depends on a seed of the training."""


def own_spread(arms: Sequence[Floats], clusters: Sequence[str] | None = None) -> ScoreSpread | None:
    """The spread over own seeds, pooled within the arms, float64[K, n] each; None if no arm has two runs.

    s^2 is the pooled variance of the runs' scores. e is the residual mean square of the two-way layout of
    runs by items, over n (with clusters, of the sums per cluster): the variance that scores would have if
    runs differed in single items only.
    """
    repeated = [arm for arm in arms if len(arm) >= 2]
    if not repeated:
        return None
    freedom = sum(len(arm) - 1 for arm in repeated)
    squares = by_items = 0.0
    for arm in repeated:
        scores = arm.mean(axis=1)
        squares += float(np.sum((scores - scores.mean()) ** 2))
        residuals = arm - arm.mean(axis=0) - (scores - scores.mean())[:, None]
        by_items += _sum_of_squares(residuals, clusters) / arm.shape[1] ** 2
    largest = max(float(np.abs(arm).max()) for arm in repeated)
    if squares <= (ROUNDING * largest) ** 2:
        squares = 0.0
    variance = squares / freedom
    return ScoreSpread(
        source="own",
        value=variance**0.5,
        variance=variance,
        by_items=by_items / freedom,
        freedom=freedom,
        seeds=sum(len(arm) for arm in repeated),
        own=(variance, freedom),
    )


def _sum_of_squares(residuals: Floats, clusters: Sequence[str] | None) -> float:
    if clusters is None:
        sums = residuals
    else:
        index, _ = cluster_index(clusters, residuals.shape[1])
        sums = np.stack([np.bincount(index, weights=row) for row in residuals])
    units = sums.shape[1]
    return float(np.sum(sums**2)) * (units / (units - 1.0) if units > 1 else 1.0)


def public_spread(task: str, variance_of_items: float) -> ScoreSpread | None:
    """The published spread of the benchmark with the task's name; None if there is none.

    Args:
        variance_of_items: of the differences per item between two runs; half of it is the variance that one
            run adds to an item, and over the benchmark's number of items it explains part of its spread.
    """
    fact = spread_of(task)
    if fact is None or fact.seed_sd is None:
        return None
    value = fact.seed_sd / 100.0
    by_items = variance_of_items / 2.0 / fact.items
    return ScoreSpread(
        source="public",
        value=value,
        variance=value**2,
        by_items=by_items,
        freedom=SEEDS - 1,
        seeds=SEEDS,
        benchmark=fact.benchmark,
    )


def pooled(spreads: Sequence[ScoreSpread]) -> list[ScoreSpread]:
    """The spreads of several tasks of the same runs, each with its variance from all tasks.

    A few seeds of one task say little. The ratio s^2 / e is pooled over the tasks with own seeds, weighted by
    their degrees of freedom; a task keeps its own variance if it exceeds the pooled one significantly (F
    test). Tasks whose seeds differ in no item take no part.
    """
    own = [other for other in spreads if other.source == "own" and other.by_items > 0.0]
    if len(own) < 2:
        return list(spreads)
    freedom = sum(spread.freedom for spread in own)
    ratio = sum(spread.freedom * spread.variance / spread.by_items for spread in own) / freedom

    def with_pooled(spread: ScoreSpread) -> ScoreSpread:
        if spread.source != "own" or spread.by_items <= 0.0:
            return spread
        expected = ratio * spread.by_items
        limit = float(scipy.stats.f.isf(OUTLYING, spread.freedom, freedom)) * expected
        if spread.variance > limit:
            return spread
        return replace(spread, variance=expected, freedom=freedom)

    return [with_pooled(other) for other in spreads]


@dataclass(frozen=True)
class SeedGroup:
    """The seeds of another group of the project on the same task.

    Attributes:
        score: the mean score of its runs.
        excess: their variance beyond what items explain; of `freedom` degrees of freedom.
    """

    score: float
    excess: float
    freedom: float


def offset_prior(
    metric: str, score: float, item_spread: float, losses: Prior = PUBLIC, groups: Sequence[SeedGroup] = ()
) -> Prior:
    """The prior of the offset between seeds, in the unit of the score.

    For losses it is that of the training loss, relative to the score (in nats for a perplexity, whose
    logarithm is a loss). Other metrics have one relative to the spread of their items.

    Args:
        score: of the baseline.
        item_spread: standard deviation of one run's items.
        losses: the prior of the training loss, from `losses.seeds.pooled_prior`.
        groups: the project's other groups with this task. They count as one more group each.
    """
    relative = is_loss(metric)
    if is_perplexity(metric):
        prior = replace(PUBLIC_NATS, spread=PUBLIC_NATS.spread * abs(score))
    elif relative and abs(score) < NATS_FROM_ZERO:
        prior = PUBLIC_NATS
    elif relative:
        prior = replace(losses, spread=losses.spread * abs(score))
    else:
        prior = Prior(OFFSET_IN_ITEMS * item_spread, OFFSET_FREEDOM)
    freedom = sum(group.freedom for group in groups)
    if not freedom:
        return prior
    squares = sum(
        group.freedom * group.excess * ((score / group.score) ** 2 if relative and group.score else 1.0)
        for group in groups
    )
    total = prior.freedom + freedom
    variance = (prior.freedom * prior.spread**2 + squares) / total
    return Prior(variance**0.5, min(total, MAX_FREEDOM), "project")


def with_prior(spread: ScoreSpread | None, prior: Prior) -> ScoreSpread:
    """The own spread shrunk towards the prior of the offset; the prior alone without own seeds.

    A spread that is much wider than the prior stays as it is (`losses.seeds.shrunk`).
    """
    if spread is None or spread.source == "unknown":
        source: Source = "project" if prior.source == "project" else "public"
        return ScoreSpread(
            source=source, value=prior.spread, variance=prior.spread**2, by_items=0.0, freedom=prior.freedom
        )
    if spread.source != "own":
        return spread
    # The spread of other tasks says no more about this one than that of so many seeds.
    freedom = min(spread.freedom, spread.own[1] + MAX_FREEDOM)
    expected = replace(prior, spread=(prior.spread**2 + spread.by_items) ** 0.5)
    variance, total, _ = shrunk(spread.variance, freedom, expected)
    return replace(spread, variance=variance, freedom=total)
