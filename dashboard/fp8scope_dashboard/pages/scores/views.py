"""Evaluation scores: the forest plot of all tasks, and one task with its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final
from urllib.parse import quote, urlencode
from uuid import UUID

from django.http import HttpRequest, HttpResponse, QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.coverage import in_short
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.score_comparisons import score_of, summary_of
from fp8scope_dashboard.analysis.scores import quality
from fp8scope_dashboard.analysis.scores.agreement import Agreement, agreement
from fp8scope_dashboard.analysis.verdict_coverage import judged_now
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.address_values import uuid_in, whole_number
from fp8scope_dashboard.pages.badges import UNKNOWN, VERDICTS, Badge, score_badge
from fp8scope_dashboard.pages.charts.arms import Arm, Arms
from fp8scope_dashboard.pages.formatting import count as count_text
from fp8scope_dashboard.pages.formatting import number, percent, points
from fp8scope_dashboard.pages.scores.forest import (
    MAX_ROWS,
    ORDER,
    ForestRow,
    arm_name,
    comparisons_of,
    forest_rows,
    latest_comparisons,
    mean_score,
    members_of,
    newest_arms,
    signed,
    wider_limit,
)
from fp8scope_dashboard.pages.scores.precision_matrix import shown_matrix
from fp8scope_dashboard.runs.models import Run

# The page shows the newest of each.
MAX_RUNS: Final = 12
MAX_CHECKPOINTS: Final = 12
MAX_TASKS: Final = 400
# Runs whose items are compared one by one with the baseline's.
MAX_PAIRED: Final = 6
SEARCH_LENGTH: Final = 200
SORTS: Final[Mapping[str, str]] = {
    "attention": "worst first",
    "task": "task",
    "difference": "difference in margins",
}
VERDICT_WORDS: Final[Mapping[str, str]] = {
    "worse": "worse",
    "cannot_tell": "cannot tell",
    "better": "better",
    "equivalent": "equivalent",
}


@dataclass(frozen=True, kw_only=True)
class ScoreQuery:
    """The choices of the address; empty or None: everything. Unknown values become the defaults."""

    search: str
    verdict: str
    run: UUID | None
    step: int | None
    sort: str
    task: str
    metric: str

    @classmethod
    def of(cls, query: QueryDict) -> ScoreQuery:
        """Read the address."""
        verdict, sort = query.get("verdict", ""), query.get("sort", "")
        return cls(
            search=query.get("q", "").strip()[:SEARCH_LENGTH],
            verdict=verdict if verdict in ORDER else "",
            run=uuid_in(query.get("run", "")),
            step=whole_number(query.get("step", "")),
            sort=sort if sort in SORTS else "attention",
            task=query.get("task", "")[:128],
            metric=query.get("metric", "")[:64],
        )

    def query(self, **changes: str) -> str:
        """The query of the same view with `changes`, for links."""
        fields = {
            "q": self.search,
            "verdict": self.verdict,
            "run": str(self.run or ""),
            "step": "" if self.step is None else str(self.step),
            "sort": "" if self.sort == "attention" else self.sort,
            "task": self.task,
            "metric": self.metric,
        } | changes
        query = QueryDict(mutable=True)
        query.update({name: value for name, value in fields.items() if value})
        return query.urlencode()


@dataclass(frozen=True, kw_only=True)
class Overall:
    """One group's verdict over all tasks of its last compared checkpoint."""

    run: Run
    name: str
    arm: Arm
    step: int
    badge: Badge
    sentence: str


@dataclass(frozen=True)
class TaskRow:
    """A row of the forest plot, and the query of its task."""

    row: ForestRow
    query: str
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One group at one checkpoint of the chosen task; figures as text."""

    run: Run
    name: str
    members: list[dict[str, Any]]
    arm: Arm
    step: int
    badge: Badge
    share: str
    score: str
    baseline_score: str
    difference: str
    interval: str
    detectable: str
    items: int


@dataclass(frozen=True)
class Pairs:
    """The items of one run against those of one baseline run."""

    run: Run
    baseline: Run
    step: int
    items: Agreement


@dataclass(frozen=True, kw_only=True)
class Power:
    """The sensitivity of one task, from the comparison of one run at its last checkpoint; as text."""

    row: ForestRow
    wanted: str
    signal_to_noise: float | None
    noise_source: str
    monotonicity: float | None
    baseline_monotonicity: float | None


@dataclass(frozen=True, kw_only=True)
class ShownTask:
    """The chosen task."""

    name: str
    metric: str
    in_percent: bool
    higher_is_better: bool
    rows: list[ForestRow]
    checkpoints: list[Checkpoint]
    pairs: list[Pairs]

    @property
    def query(self) -> str:
        """The query of its charts."""
        return "?" + urlencode({"name": self.name, "metric": self.metric}, quote_via=quote)


@in_project()
def evaluations(request: HttpRequest, project: Project) -> HttpResponse:
    """The forest plot of the chosen rows, and one task with its checkpoints."""
    chosen = ScoreQuery.of(request.GET)
    arms = Arms(project)
    tasks = _tasks(project)
    comparisons = latest_comparisons(project, None if chosen.run is None else [chosen.run], chosen.step)
    rows = _selected(forest_rows(project, comparisons, arms), chosen)
    task = _task(project, arms, tasks, rows, chosen)
    is_chosen = (task.name, task.metric) if task else ("", "")
    context: dict[str, Any] = {
        "tasks": tasks,
        "compared": bool(comparisons),
        "lines": [
            TaskRow(
                row,
                chosen.query(task=row.name, metric=row.metric),
                (row.name, row.metric) == is_chosen,
            )
            for row in rows
        ],
        "unjudged": _unjudged(tasks, comparisons, chosen),
        "overall": _overall(project, arms),
        "task": task,
        "power": _power(project, comparisons, rows),
        "chosen": chosen,
        "sorts": SORTS,
        "verdicts": VERDICT_WORDS,
        "runs": sorted(
            (run for members in newest_arms(project) for run in members), key=lambda run: run.created_at
        ),
        "steps": _steps(project),
        "matrix": shown_matrix(project, request.GET.get("matrix", "")[:128]),
        "is_cut": len(comparisons) >= MAX_ROWS,
        "most_rows": MAX_ROWS,
        "query": chosen.query(),
    }
    is_part = request.headers.get("HX-Target") == "tasks"
    return page(
        request,
        project,
        "evaluations",
        "pages/scores/_evaluations.html" if is_part else "pages/scores/evaluations.html",
        context,
    )


def _tasks(project: Project) -> dict[tuple[str, str], tuple[str, bool]]:
    """Kind and direction of every task of the project, by name and metric."""
    stored = Evaluation.scores.filter(run__project=project, run__deleted_at=None)
    newest = stored.order_by("name", "metric", "-id").distinct("name", "metric")[:MAX_TASKS]
    fields = newest.values_list("name", "metric", "kind", "higher_is_better")
    return {(name, metric): (kind, higher) for name, metric, kind, higher in fields}


def _steps(project: Project) -> list[int]:
    """The last checkpoints with a comparison, newest first."""
    rows = EvaluationComparison.objects.filter(run__project=project, run__deleted_at=None).order_by("-step")
    return list(rows.values_list("step", flat=True).distinct()[:MAX_CHECKPOINTS])


def _selected(rows: list[ForestRow], chosen: ScoreQuery) -> list[ForestRow]:
    words = chosen.search.casefold().split()
    shown = [
        row
        for row in rows
        if (not chosen.verdict or row.verdict == chosen.verdict)
        and all(word in _searched(row) for word in words)
    ]
    if chosen.sort == "task":
        shown.sort(key=lambda row: (row.name, row.metric, row.run))
    elif chosen.sort == "difference":
        shown.sort(key=lambda row: -abs(row.size))
    return shown


def _searched(row: ForestRow) -> str:
    """The text of a row that a search looks in."""
    members = " ".join(member["name"] for member in row.members)
    return f"{row.name} {row.metric} {row.run} {members}".casefold()


def _unjudged(
    tasks: Mapping[tuple[str, str], object], comparisons: Sequence[EvaluationComparison], chosen: ScoreQuery
) -> list[tuple[str, str, str]]:
    """Tasks without a comparison: name, metric and query."""
    judged = {(row.name, row.metric) for row in comparisons}
    words = chosen.search.casefold().split()
    return [
        (name, metric, chosen.query(task=name, metric=metric))
        for name, metric in tasks
        if (name, metric) not in judged and all(word in f"{name} {metric}".casefold() for word in words)
    ]


def _overall(project: Project, arms: Arms) -> list[Overall]:
    """The newest groups with a comparison, each at the last compared checkpoint of its furthest run."""
    rows = EvaluationComparison.objects.filter(run__project=project, run__deleted_at=None)
    furthest = dict(rows.order_by("run_id", "-step").distinct("run_id").values_list("run_id", "step"))
    newest = [
        max(members, key=lambda run: (furthest[run.pk], run.created_at)) for members in newest_arms(project)
    ]
    by_run = groupby(
        rows.filter(run__in=newest)
        .select_related("run", "run__project")
        .order_by("-run__created_at", "run_id", "-step", "name", "metric"),
        key=lambda row: row.run,
    )
    overall = []
    for run, listed in by_run:
        compared = list(listed)
        last = [row for row in compared if row.step == compared[0].step]
        summary = summary_of(run, last)
        judged = [judged_now(run, row) for row in last]
        in_part = next((task for task in judged if task.verdict == summary.verdict), None)
        badge = VERDICTS.get(summary.verdict) or (score_badge(in_part) if in_part else UNKNOWN)
        runs = max(len((row.result.get("group") or {}).get("runs", ())) for row in last)
        name = arm_name(run, range(runs) if runs > 1 else ())
        overall.append(
            Overall(
                run=run,
                name=name,
                arm=arms.of(run),
                step=last[0].step,
                badge=badge,
                sentence=summary.explanation,
            )
        )
    return overall


def _task(
    project: Project,
    arms: Arms,
    tasks: Mapping[tuple[str, str], tuple[str, bool]],
    rows: Sequence[ForestRow],
    chosen: ScoreQuery,
) -> ShownTask | None:
    """The task in the address; else the first of the forest plot, or of all."""
    key = (chosen.task, chosen.metric)
    if key not in tasks:
        key = next(iter([(row.name, row.metric) for row in rows] or tasks), ("", ""))
    if key not in tasks:
        return None
    (name, metric), (kind, higher) = key, tasks[key]
    stored = comparisons_of(project, name, metric)
    if chosen.run is not None:
        stored = stored.filter(run=chosen.run)
    listed = list(stored.order_by("-step", "-run__created_at")[: MAX_RUNS * MAX_CHECKPOINTS])
    in_percent = kind == "proportion"
    return ShownTask(
        name=name,
        metric=metric,
        in_percent=in_percent,
        higher_is_better=higher,
        rows=[row for row in rows if (row.name, row.metric) == key],
        checkpoints=_checkpoints(listed, arms, in_percent=in_percent),
        pairs=_pairs(listed),
    )


def _checkpoints(rows: Sequence[EvaluationComparison], arms: Arms, *, in_percent: bool) -> list[Checkpoint]:
    size, distance = (percent, points) if in_percent else (number, number)
    shown = []
    listed: set[tuple[str, str, int]] = set()
    for row in rows:
        arm = (row.run.group or str(row.run_id), row.run.baseline, row.step)
        if arm in listed:
            continue
        listed.add(arm)
        members = members_of(row.result, in_percent=in_percent)
        result, judgement = row.result, judged_now(row.run, row)
        interval = result.get("difference_interval")
        shown.append(
            Checkpoint(
                run=row.run,
                name=arm_name(row.run, members),
                members=members,
                arm=arms.of(row.run),
                step=row.step,
                badge=score_badge(judgement, wider_limit(result, distance)),
                share=in_short(judgement.coverage),
                score=size(mean_score(result)),
                baseline_score=size(result.get("baseline_score")),
                difference=signed(result.get("difference"), in_percent=in_percent),
                interval=" to ".join(signed(end, in_percent=in_percent) for end in interval or ()),
                detectable=distance(result.get("smallest_detectable")),
                items=int(result.get("n") or 0),
            )
        )
    return shown


def _pairs(rows: Sequence[EvaluationComparison]) -> list[Pairs]:
    """Each run's items at its last checkpoint against those of the first baseline run that has them."""
    pairs = []
    last = {row.run_id: row for row in reversed(rows)}
    for row in list(last.values())[:MAX_PAIRED]:
        baselines = comparison_runs.baseline_runs(row.run)
        stored = Evaluation.scores.filter(
            run__in=[row.run, *baselines], name=row.name, metric=row.metric, step=row.step
        )
        newest = {comparison.run_id: comparison for comparison in stored.order_by("id")}
        baseline = next((run for run in baselines if run.pk in newest), None)
        if baseline is None or row.run_id not in newest:
            continue
        items = agreement(score_of(newest[row.run_id]), score_of(newest[baseline.pk]))
        if items is not None:
            pairs.append(Pairs(row.run, baseline, row.step, items))
    return pairs


def _power(
    project: Project, comparisons: Sequence[EvaluationComparison], rows: Sequence[ForestRow]
) -> list[Power]:
    """Return what the shown rows' evaluations can show, in their order."""
    results = {(str(row.run_id), row.name, row.metric): row.result for row in comparisons}
    trends = _trends(project, rows)
    power = []
    for row in rows:
        key = (row.run_id, row.name, row.metric)
        result = results[key]
        if not result.get("smallest_detectable"):
            continue
        steps, scores, baseline = trends.get(key, ([], [], []))

        def trend(values: list[float], steps: list[int] = steps, row: ForestRow = row) -> float | None:
            return quality.monotonicity(steps, values, higher_is_better=row.higher_is_better)

        power.append(
            Power(
                row=row,
                wanted=_wanted(result),
                signal_to_noise=result.get("signal_to_noise"),
                noise_source=str((result.get("seed_spread") or {}).get("source", "")),
                monotonicity=trend(scores),
                baseline_monotonicity=trend(baseline),
            )
        )
    return power


Trends = dict[tuple[str, str, str], tuple[list[int], list[float], list[float]]]


def _trends(project: Project, rows: Sequence[ForestRow]) -> Trends:
    """Steps, scores and baseline scores of all checkpoints, by run and task."""
    stored = EvaluationComparison.objects.filter(
        run__project=project, run__in={row.run_id for row in rows}, name__in={row.name for row in rows}
    )
    fields = stored.order_by("step").values_list(
        "run_id", "name", "metric", "step", "result__score", "result__baseline_score"
    )
    trends: Trends = {}
    for run_id, name, metric, step, score, baseline in fields:
        if score is None or baseline is None:
            continue
        steps, scores, baselines = trends.setdefault((str(run_id), name, metric), ([], [], []))
        steps.append(step)
        scores.append(float(score))
        baselines.append(float(baseline))
    return trends


def _wanted(result: dict[str, Any]) -> str:
    """The items, or seeds in each arm, that would show a difference of the margin."""
    needs = result.get("needs")
    if needs is None:
        return "enough"
    items, seeds = needs.get("items"), needs.get("seeds")
    if items is None:
        return f"{seeds} seeds" if seeds else "more seeds"
    return f"{count_text(items)} items"
