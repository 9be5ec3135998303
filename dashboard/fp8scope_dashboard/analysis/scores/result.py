"""The scores of a comparison, and the verdict on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, Prior
from fp8scope_dashboard.analysis.own_differences import RunDifference
from fp8scope_dashboard.analysis.scores.intervals import Interval
from fp8scope_dashboard.analysis.scores.seeds import SeedGroup
from fp8scope_dashboard.statistics.arrays import Floats

Verdict = Literal["equivalent", "worse", "better", "cannot_tell"]

# Raise it when results change for the same scores.
METHOD_VERSION = 3
# With fewer items there is no verdict.
ITEMS = 2


@dataclass(frozen=True)
class RunScore:
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


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of one evaluation: the judged run first, then others of its seed group, and the baseline's.

    Attributes:
        margin: largest difference that counts as none, in the unit of the score; None for the default. With 0
            only identical items are equivalent.
        same_weights: both evaluate one checkpoint, so that no spread between seeds is in the difference.
        losses: the prior of the training loss's spread between seeds.
        groups: the project's other groups of seeds on this task.
    """

    name: str
    metric: str
    kind: str
    higher_is_better: bool
    arm: Sequence[RunScore]
    baselines: Sequence[RunScore]
    margin: float | None = None
    same_weights: bool = False
    losses: Prior = PUBLIC
    groups: Sequence[SeedGroup] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreComparison:
    """The verdict on a score.

    Attributes:
        interval, baseline_interval: at level 1 - alpha, the picture. The baseline's is that of a further
            seed, or of its run over items. None where none is reliable.
        inside: whether the score is in the baseline's interval.
        difference: run - baseline, over the items that all runs have: the means of the two arms.
        difference_interval: the interval that decided, of level `interval_level`: 'worse' and 'better' where
            it excludes 0, 'equivalent' where it is within the margin. None where none is reliable (`doubt`).
        equivalent_within: the limit that an 'equivalent' holds for: the margin or more; see `verdict.judge`.
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
