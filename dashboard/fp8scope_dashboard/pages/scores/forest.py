"""The forest plot of evaluations: one row for each task and seed group, with its verdict against the margin.

The runs' own differences stand under the row of their group.

A row holds only JSON types, so that a shared report can store it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django.db.models import Case, CharField, F, QuerySet, When, Window
from django.db.models.functions import Cast, RowNumber

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.coverage import in_short
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.scores.precision import NAMES
from fp8scope_dashboard.analysis.verdict_coverage import judged_now
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.badges import Badge, score_badge
from fp8scope_dashboard.pages.charts.arms import Arms
from fp8scope_dashboard.pages.formatting import NOTHING, number, percent, points
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import count

# The newest groups with a comparison, the runs that they are looked for among, and the rows of one plot.
MAX_RUNS: Final = 12
MAX_SEEDS: Final = 400
MAX_ROWS: Final = 400
ORDER: Final = ("worse", "cannot_tell", "better", "equivalent")
"""Verdicts, those that need attention first."""


@dataclass(frozen=True)
class Positions:
    """The positions of the parts of a row, in per cent of a bar from -REACH to +REACH margins.

    To the right FP8 is better, whatever the direction of the metric.

    Attributes:
        point: the difference, at the edge if it is beyond; `off_scale` is then -1 or 1, else 0.
        low, high: the ends of its interval.
        detectable: the smallest harm that the evaluation finds; None if it is beyond the bar.
    """

    point: float
    low: float
    high: float
    off_scale: int
    detectable: float | None

    REACH = 3.0


@dataclass(frozen=True, kw_only=True)
class ForestRow:
    """One task of one group at its last compared checkpoint; the figures are text, ready to be shown.

    Attributes:
        run_id: the run whose comparison it is; `run` is its name, or that of the group of several runs.
        score: the mean of the group.
        members: the runs of a group of several: name, run_id, score, difference, and whether it left.
    """

    name: str
    metric: str
    run_id: str
    run: str
    slot: str
    step: int
    items: int
    higher_is_better: bool
    verdict: str
    badge: dict[str, str]
    share: str
    reason: str
    explanation: str
    warnings: list[str]
    score: str
    baseline_score: str
    difference: str
    interval: str
    margin: str
    detectable: str
    evaluated_in: str
    size: float
    plot: dict[str, float | int | None] | None
    members: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class TaskKind:
    """The summary of a task's evaluations."""

    in_percent: bool
    higher_is_better: bool


def latest_comparisons(
    project: Project, runs: Sequence[UUID] | None = None, step: int | None = None
) -> list[EvaluationComparison]:
    """The last comparison of each task of each seed group, or those at `step`; the newest groups' if no runs
    are given.
    """
    rows = EvaluationComparison.objects.filter(run__project=project, run__deleted_at=None)
    if runs is None:
        runs = [run.pk for members in newest_arms(project) for run in members]
    rows = rows.filter(run__in=runs)
    if step is not None:
        rows = rows.filter(step=step)
    rank = Window(
        RowNumber(),
        partition_by=[_arm_key(), F("run__baseline"), F("name"), F("metric")],
        order_by=[F("step").desc(), F("run__created_at").desc(), F("run_id").asc()],
    )
    last = rows.annotate(rank=rank).filter(rank=1)
    return list(_by_id(last).order_by("name", "metric", "run__created_at", "run_id")[:MAX_ROWS])


def newest_arms(project: Project) -> list[list[Run]]:
    """The newest seed groups, and runs without a group, that have a comparison of a score; newest first."""
    rows = EvaluationComparison.objects.filter(run__project=project, run__deleted_at=None)
    newest = Run.objects.filter(pk__in=rows.values("run")).order_by("-created_at", "id")
    arms: dict[tuple[str, str], list[Run]] = {}
    for run in newest.defer("config", "environment", "summary", "error")[:MAX_SEEDS]:
        arms.setdefault((run.group or str(run.pk), run.baseline), []).append(run)
    return list(arms.values())[:MAX_RUNS]


def _arm_key() -> Case:
    """Return what the runs of a seed group share; the id of a run without a group."""
    alone = Cast("run_id", CharField())
    return Case(When(run__group="", then=alone), default=F("run__group"), output_field=CharField())


def _by_id(rows: QuerySet[EvaluationComparison]) -> QuerySet[EvaluationComparison]:
    # PostgreSQL orders the rows of DISTINCT ON by its own columns first.
    ids = list(rows.values_list("pk", flat=True))
    return EvaluationComparison.objects.filter(pk__in=ids).select_related("run", "run__project")


def comparisons_of(project: Project, name: str, metric: str) -> QuerySet[EvaluationComparison]:
    """All comparisons of one task, in no order."""
    rows = EvaluationComparison.objects.filter(
        run__project=project, run__deleted_at=None, name=name, metric=metric
    )
    return rows.select_related("run", "run__project")


def forest_rows(project: Project, comparisons: Iterable[EvaluationComparison], arms: Arms) -> list[ForestRow]:
    """The rows of these comparisons, those that need attention first."""
    listed = list(comparisons)
    kinds = kinds_of(project, {(row.name, row.metric) for row in listed})
    precisions = _precisions(listed)
    rows = [_row(row, kinds[row.name, row.metric], precisions, arms) for row in listed]
    return sorted(rows, key=attention)


def attention(row: ForestRow) -> tuple[int, str, str, str]:
    """The sort key that puts rows that need attention first."""
    rank = ORDER.index(row.verdict) if row.verdict in ORDER else len(ORDER)
    return rank, row.name, row.metric, row.run


def positions(
    difference: float,
    interval: tuple[float, float],
    margin: float,
    detectable: float | None,
    *,
    higher_is_better: bool,
) -> Positions | None:
    """Scale a difference to the bar; None without a margin, or with values that are not finite."""
    if not margin > 0 or not all(math.isfinite(value) for value in (difference, *interval, margin)):
        return None
    sign = 1.0 if higher_is_better else -1.0

    def at(value: float) -> float:
        return round(50.0 + 50.0 * max(-1.0, min(1.0, sign * value / margin / Positions.REACH)), 2)

    ends = sorted(at(value) for value in interval)
    in_margins = sign * difference / margin
    beyond = 0 if abs(in_margins) <= Positions.REACH else int(math.copysign(1, in_margins))
    harm = None
    if detectable is not None and math.isfinite(detectable) and detectable <= Positions.REACH * margin:
        harm = round(50.0 - 50.0 * detectable / margin / Positions.REACH, 2)
    return Positions(at(difference), ends[0], ends[1], beyond, harm)


def _row(
    row: EvaluationComparison,
    kind: TaskKind,
    precisions: Mapping[tuple[UUID, int, str, str], str],
    arms: Arms,
) -> ForestRow:
    result: Mapping[str, Any] = row.result
    judgement = judged_now(row.run, row)
    size = percent if kind.in_percent else number
    distance = points if kind.in_percent else number
    badge: Badge = score_badge(judgement, wider_limit(result, distance))
    interval, margin = result.get("difference_interval"), result.get("margin")
    difference = result.get("difference")
    plot = None
    if interval and difference is not None and margin:
        plot = positions(
            float(difference),
            (float(interval[0]), float(interval[1])),
            float(margin),
            result.get("smallest_detectable"),
            higher_is_better=kind.higher_is_better,
        )
    members = members_of(result, in_percent=kind.in_percent)
    return ForestRow(
        name=row.name,
        metric=row.metric,
        run_id=str(row.run_id),
        run=arm_name(row.run, members),
        slot=arms.of(row.run).slot,
        step=row.step,
        items=int(result.get("n") or 0),
        higher_is_better=kind.higher_is_better,
        verdict=judgement.measured,
        badge={"label": badge.label, "tone": badge.tone, "icon": badge.icon},
        share=in_short(judgement.coverage),
        reason=judgement.reason,
        explanation=str(result.get("explanation", "")),
        warnings=[str(warning) for warning in result.get("warnings", ())],
        score=size(mean_score(result)),
        baseline_score=size(result.get("baseline_score")),
        difference=signed(difference, in_percent=kind.in_percent),
        interval=" to ".join(signed(end, in_percent=kind.in_percent) for end in interval) if interval else "",
        margin=f"±{distance(margin)}" if margin else NOTHING,
        detectable=distance(result.get("smallest_detectable")),
        evaluated_in=precisions.get((row.run_id, row.step, row.name, row.metric), ""),
        size=float(difference) / float(margin) if difference is not None and margin else 0.0,
        plot=None if plot is None else dict(vars(plot)),
        members=members,
    )


def members_of(result: Mapping[str, Any], *, in_percent: bool) -> list[dict[str, Any]]:
    """The runs of a group of several with their own differences as text, those that left first."""
    runs = (result.get("group") or {}).get("runs", ())
    if len(runs) < 2:
        return []
    size = percent if in_percent else number
    return [
        {
            "name": run["name"],
            "run_id": run["run"],
            "score": size(run["value"]),
            "difference": signed(run["difference"], in_percent=in_percent),
            "left": run["left"],
            "from_group": signed(run["from_group"], in_percent=in_percent) if run["left"] else "",
        }
        for run in sorted(runs, key=lambda run: (not run["left"], run["name"]))
    ]


def arm_name(run: Run, members: Sequence[object]) -> str:
    """The name of a run, or of its group with the number of its runs that were compared."""
    return f"{run.group} ({count(len(members), 'run')})" if members and run.group else run.name


def mean_score(result: Mapping[str, Any]) -> float | None:
    """The mean score of the group of a comparison; that of the run where its group has one."""
    values = [run["value"] for run in (result.get("group") or {}).get("runs", ())]
    return sum(values) / len(values) if len(values) > 1 else result.get("score")


def wider_limit(result: Mapping[str, Any], size: Callable[[float], str]) -> str:
    """The limit that an equivalence holds for, if it is more than the margin; else empty."""
    within, margin = result.get("equivalent_within"), result.get("margin")
    return size(within) if within is not None and margin is not None and within > margin else ""


def signed(value: float | None, *, in_percent: bool) -> str:
    """A difference with its sign, in percentage points for proportions."""
    if value is None:
        return NOTHING
    if in_percent:
        return points(value, signed=True)
    return f"+{number(value)}" if value > 0 else number(value)


def kinds_of(project: Project, tasks: Iterable[tuple[str, str]]) -> dict[tuple[str, str], TaskKind]:
    """The kind of each task, by its name and metric."""
    wanted = set(tasks)
    rows = Evaluation.scores.filter(run__project=project, name__in={name for name, _ in wanted})
    fields = rows.order_by("name", "metric", "-id").distinct("name", "metric")
    kinds = {
        (name, metric): TaskKind(kind == "proportion", higher)
        for name, metric, kind, higher in fields.values_list("name", "metric", "kind", "higher_is_better")
    }
    # An evaluation may be deleted after its comparison was stored.
    return {task: kinds.get(task, TaskKind(False, True)) for task in wanted}


def _precisions(rows: Sequence[EvaluationComparison]) -> dict[tuple[UUID, int, str, str], str]:
    """The precision of the evaluation's forward pass, in its usual spelling, where it is known."""
    stored = Evaluation.scores.filter(
        run__in={row.run_id for row in rows}, step__in={row.step for row in rows}, precision__isnull=False
    )
    fields = stored.order_by("id").values_list("run_id", "step", "name", "metric", "precision")
    return {
        (run_id, step, name, metric): NAMES.get(str(precision), str(precision))
        for run_id, step, name, metric, precision in fields
    }
