"""Evaluation scores with their intervals, and the verdicts of FP8 runs against BF16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from django.http import HttpRequest, HttpResponse
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.coverage import in_short
from fp8scope_dashboard.analysis.judging import judged_now
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.score_comparisons import score_of, summary_of
from fp8scope_dashboard.analysis.scores import quality
from fp8scope_dashboard.analysis.scores.metrics import limits_of
from fp8scope_dashboard.analysis.scores.verdict import item_interval
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.comparison_groups import Arm, Arms, arm_labels
from fp8scope_dashboard.pages.figures.comparisons import ScoreBand, ScorePoint, scores_figure
from fp8scope_dashboard.pages.formatting import number, percent
from fp8scope_dashboard.pages.series_loading import Options
from fp8scope_dashboard.pages.verdicts import UNKNOWN, VERDICTS, Badge, score_badge
from fp8scope_dashboard.pages.views.figure_answers import empty_answer, figure_answer
from fp8scope_dashboard.runs.models import Run

# The page shows the newest of each.
MOST_TASKS = 12
MOST_RUNS = 12
MOST_CHECKPOINTS = 12


@dataclass(frozen=True)
class Verdict:
    """A row of the table: one run at one checkpoint against its baseline."""

    comparison: EvaluationComparison
    arm: Arm
    badge: Badge
    result: dict[str, Any]
    share: str
    reason: str


@dataclass(frozen=True)
class Overall:
    """One run's verdict over all tasks of its last compared checkpoint."""

    run: Run
    arm: Arm
    step: int
    badge: Badge
    sentence: str


@dataclass(frozen=True)
class Power:
    """What one task can show, from the comparison of one run at its last checkpoint; as text."""

    run: Run
    n: int
    detectable: str
    margin: str
    wanted: str
    signal_to_noise: float | None
    noise_source: str
    monotonicity: float | None
    baseline_monotonicity: float | None


@dataclass(frozen=True)
class Task:
    """One evaluation with its verdicts, latest checkpoint first."""

    name: str
    metric: str
    higher_is_better: bool
    verdicts: list[Verdict]
    power: list[Power]


@in_project()
def evaluations(request: HttpRequest, project: Project) -> HttpResponse:
    """All tasks with their charts and verdicts, and a verdict over the tasks for each run."""
    stored = Evaluation.objects.filter(run__project=project)
    names = stored.order_by("name", "metric").distinct("name", "metric")
    arms = Arms(project)
    tasks = [
        _task(project, arms, *fields)
        for fields in names.values_list("name", "metric", "kind", "higher_is_better")[:MOST_TASKS]
    ]
    template = (
        "pages/_evaluations.html" if request.headers.get("HX-Target") == "tasks" else "pages/evaluations.html"
    )
    shown = {"tasks": tasks, "overall": _overall(project, arms)}
    return page(request, project, "evaluations", template, shown)


def _overall(project: Project, arms: Arms) -> list[Overall]:
    """The newest runs with a comparison, each at its last compared checkpoint."""
    rows = EvaluationComparison.objects.filter(run__project=project).select_related("run", "run__project")
    newest = Run.objects.filter(pk__in=rows.values("run")).order_by("-created_at")[:MOST_RUNS]
    by_run = groupby(
        rows.filter(run__in=list(newest)).order_by("-run__created_at", "run_id", "-step", "name", "metric"),
        key=lambda row: row.run,
    )
    overall = []
    for run, listed in by_run:
        compared = list(listed)
        last = [row for row in compared if row.step == compared[0].step]
        summary = summary_of(run, last)
        judged = [judged_now(run, row) for row in last]
        in_part = next((each for each in judged if each.verdict == summary.verdict), None)
        badge = VERDICTS.get(summary.verdict) or (score_badge(in_part) if in_part else UNKNOWN)
        overall.append(Overall(run, arms.of(run), last[0].step, badge, summary.explanation))
    return overall


def _task(project: Project, arms: Arms, name: str, metric: str, kind: str, higher: bool) -> Task:
    rows = EvaluationComparison.objects.filter(run__project=project, name=name, metric=metric)
    newest = list(rows.select_related("run").order_by("-step", "-run__created_at")[: MOST_RUNS * 4])
    verdicts = [_verdict(row, arms) for row in newest]
    last = [row for row in newest if row.step == newest[0].step]
    power = [_power(row, newest, kind, higher) for row in last if row.result.get("smallest_detectable")]
    return Task(name, metric, higher, verdicts, power)


def _verdict(row: EvaluationComparison, arms: Arms) -> Verdict:
    judgement = judged_now(row.run, row)
    return Verdict(
        row,
        arms.of(row.run),
        score_badge(judgement),
        dict(row.result),
        in_short(judgement.coverage),
        judgement.reason,
    )


def _power(row: EvaluationComparison, rows: Sequence[EvaluationComparison], kind: str, higher: bool) -> Power:
    """What the task shows for the run of a comparison; `rows` are those of all runs and checkpoints."""
    result = row.result
    size = percent if kind == "proportion" else number
    own = [
        each for each in rows if each.run_id == row.run_id and each.result.get("baseline_score") is not None
    ]
    steps = [each.step for each in own]

    def trend(key: str) -> float | None:
        scores = [float(each.result[key]) for each in own]
        return quality.monotonicity(steps, scores, higher_is_better=higher)

    return Power(
        run=row.run,
        n=int(result.get("n") or 0),
        detectable=size(result["smallest_detectable"]),
        margin=size(result.get("margin")),
        wanted=_wanted(result),
        signal_to_noise=result.get("signal_to_noise"),
        noise_source=str((result.get("seed_spread") or {}).get("source", "")),
        monotonicity=trend("score"),
        baseline_monotonicity=trend("baseline_score"),
    )


def _wanted(result: dict[str, Any]) -> str:
    """The items, or seeds in each arm, that would show a difference of the margin."""
    needs = result.get("needs")
    if needs is None:
        return "enough"
    items, seeds = needs.get("items"), needs.get("seeds")
    if items is None:
        return f"{seeds} seeds" if seeds else "more seeds"
    return f"{items:,} items"


@gzip_page
@in_project()
def scores(request: HttpRequest, project: Project) -> HttpResponse:
    """The chart of one task: `?name=...&metric=...`."""
    options = Options.of(request.GET)
    name, metric = request.GET.get("name", "")[:128], request.GET.get("metric", "")[:64]
    rows = Evaluation.objects.filter(run__project=project, name=name, metric=metric).select_related("run")
    steps = sorted(set(rows.order_by().values_list("step", flat=True).distinct()))[-MOST_CHECKPOINTS:]
    runs = list(rows.order_by().values_list("run_id", "run__created_at").distinct())
    newest = [run_id for run_id, _ in sorted(runs, key=lambda pair: pair[1])[-MOST_RUNS:]]
    shown = list(
        rows.filter(step__in=steps, run_id__in=newest).order_by("run__created_at", "run_id", "step", "seq")
    )
    if not shown:
        return empty_answer("No scores yet. Log them with run.log_eval(…).")
    points = _points(shown, Arms(project), project.alpha)
    bands = _bands(project, name, metric, steps)
    drawn = scores_figure(points, bands, options.theme, y_title=metric, compact=options.compact)
    last = [point for point in points if point.step == steps[-1]]
    listed = "; ".join(f"{point.name} {number(point.score)}" for point in last)
    return figure_answer(drawn, f"{name}, {metric} at step {steps[-1]}: {listed}.")


def _points(evaluations: Sequence[Evaluation], arms: Arms, alpha: float) -> list[ScorePoint]:
    """One point per run and checkpoint. If a checkpoint was evaluated twice, the latest counts."""
    points: dict[tuple[str, int], ScorePoint] = {}
    labels = arm_labels(arms, {evaluation.run_id: evaluation.run for evaluation in evaluations}.values())
    for evaluation in evaluations:
        score = score_of(evaluation)
        if not len(score.items) or not np.isfinite(score.items).all():
            continue
        low = high = None
        limits = limits_of(evaluation.kind, evaluation.metric, score.items)
        try:
            proportion = evaluation.kind == "proportion"
            (low, high), _ = item_interval(score, alpha, proportion=proportion, limits=limits)
        except ValueError:
            # Too few items for an interval: the point is drawn without one.
            pass
        points[str(evaluation.run_id), evaluation.step] = ScorePoint(
            evaluation.step,
            evaluation.run.name,
            labels[str(evaluation.run_id)],
            arms.of(evaluation.run).slot,
            float(score.items.mean()),
            low,
            high,
        )
    return list(points.values())


def _bands(project: Project, name: str, metric: str, steps: Sequence[int]) -> list[ScoreBand]:
    """The baseline's interval at each checkpoint, from the newest comparison there."""
    rows = EvaluationComparison.objects.filter(
        run__project=project, name=name, metric=metric, step__in=steps
    ).order_by("step", "run__created_at")
    bands: dict[int, ScoreBand] = {}
    for step, result in rows.values_list("step", "result"):
        interval = result.get("baseline_interval")
        if interval:
            bands[step] = ScoreBand(step, float(interval[0]), float(interval[1]))
    return list(bands.values())
