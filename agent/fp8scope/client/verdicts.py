"""Verdicts on losses and scores, as the pages show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8scope.client.fields import read_object, read_objects

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class SeedDifference:
    """The own difference of a run of a seed group; None where its loss is not finite."""

    run: str
    name: str
    seed: int | None = None
    difference: float | None = None
    left: bool = False


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """The verdict on a run's loss against its baseline.

    Attributes:
        verdict: equivalent, worse, better, cannot_tell, pending or incomplete; empty without a comparison.
        measured: that of the statistics on what is stored.
        label: what its badge says.
        unit: of the numbers: `relative` (fractions of the baseline's loss) or `nats`.
        delta, interval: the difference to the baseline, of the seed group if it has several runs.
        tolerance: the largest difference that counts as none; `margin` is what was asked for.
        smallest_detectable: the smallest difference that would have been found.
        own: this run's own difference; `left`: it left its group.
        not_judged: what the verdict does not cover, in sentences.
    """

    verdict: str
    measured: str
    label: str
    explanation: str
    final: bool
    unit: str
    delta: float | None
    interval: Interval | None
    tolerance: float | None
    margin: float | None
    smallest_detectable: float | None
    own: float | None
    left: bool
    baseline: str
    baseline_runs: int
    members: tuple[SeedDifference, ...]
    coverage: str
    not_judged: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "RunVerdict":
        """A verdict of an answer."""
        return read_object(cls, answer, members=read_objects(SeedDifference, answer["members"]))

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, kw_only=True)
class EvaluatedScore:
    """One evaluation of a run: its score with the interval over its items; None where none is reliable."""

    name: str
    metric: str
    step: int
    kind: str
    higher_is_better: bool
    score: float | None
    interval: Interval | None
    items: int
    precision: str | None


@dataclass(frozen=True, kw_only=True)
class JudgedScore:
    """A score against the baseline's. `interval` is that of the difference, in the unit of the score."""

    name: str
    metric: str
    step: int
    higher_is_better: bool
    verdict: str
    measured: str
    label: str
    explanation: str
    score: float | None
    baseline_score: float | None
    difference: float | None
    interval: Interval | None
    margin: float | None
    smallest_detectable: float | None
    items: int
    members: tuple[SeedDifference, ...]
    not_judged: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "JudgedScore":
        """A comparison of an answer."""
        return read_object(cls, answer, members=read_objects(SeedDifference, answer["members"]))


@dataclass(frozen=True, kw_only=True)
class RunPair:
    """Two runs, of which one is the other's baseline or belongs to it.

    The verdict is the one that the page of the judged run shows: it is about all runs of both groups.

    Attributes:
        a, b: id and name of each.
        judged: the id of the run whose verdict it is; empty without one.
        reason: why there is no verdict, and how to get one; empty with one.
        costs: speed, memory and tokens against the baseline, in words; `quantities` are their numbers.
        configuration: the entries in which the two differ, each with `key`, `a` and `b`.
    """

    a: tuple[str, str]
    b: tuple[str, str]
    judged: str
    verdict: RunVerdict | None
    reason: str
    costs: str
    quantities: Mapping[str, Any]
    evaluations: tuple[JudgedScore, ...]
    configuration: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "RunPair":
        """A comparison of an answer."""
        verdict, judged = answer["verdict"], answer["judged"]
        return read_object(
            cls,
            answer,
            a=_reference(answer["a"]),
            b=_reference(answer["b"]),
            judged="" if judged is None else str(judged["id"]),
            verdict=None if verdict is None else RunVerdict.of(verdict),
            evaluations=tuple(JudgedScore.of(score) for score in answer["evaluations"]),
        )

    @property
    def delta(self) -> float | None:
        """The difference of the losses, in the unit of the verdict."""
        return None if self.verdict is None else self.verdict.delta

    @property
    def interval(self) -> Interval | None:
        """The interval of `delta`."""
        return None if self.verdict is None else self.verdict.interval

    @property
    def margin(self) -> float | None:
        """The difference below which the runs count as equivalent."""
        return None if self.verdict is None else self.verdict.margin

    @property
    def seeds(self) -> tuple[SeedDifference, ...]:
        """The runs of the judged group, with their own differences; empty for a group of one."""
        return () if self.verdict is None else self.verdict.members

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Return what the verdict does not cover; without a verdict, why there is none."""
        return (self.reason,) if self.verdict is None else self.verdict.not_judged


def _reference(answer: Mapping[str, Any]) -> tuple[str, str]:
    return str(answer["id"]), str(answer["name"])
