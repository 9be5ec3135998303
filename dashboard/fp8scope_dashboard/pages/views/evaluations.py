"""Evaluation scores with their intervals, and the verdicts of FP8 runs against BF16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.http import HttpRequest, HttpResponse
from django.views.decorators.gzip import gzip_page

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.coverage import in_short
from fp8scope_dashboard.analysis.judging import judged_now
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.scores import Score, item_interval
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.comparison_groups import Arm, Arms, arm_labels
from fp8scope_dashboard.pages.figures.comparisons import ScoreBand, ScorePoint, scores_figure
from fp8scope_dashboard.pages.formatting import number
from fp8scope_dashboard.pages.series_loading import Options
from fp8scope_dashboard.pages.verdicts import Badge, score_badge
from fp8scope_dashboard.pages.views.figures import empty_answer, figure_answer

# The page shows the newest of evaluation.
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
class Task:
    """One evaluation with its verdicts, latest checkpoint first."""

    name: str
    metric: str
    higher_is_better: bool
    verdicts: list[Verdict]


@in_project()
def evaluations(request: HttpRequest, project: Project) -> HttpResponse:
    """All tasks with their charts and verdicts."""
    evaluations = Evaluation.objects.filter(run__project=project)
    names = evaluations.order_by("name", "metric").distinct("name", "metric")
    arms = Arms(project)
    tasks = [
        Task(name, metric, higher, _verdicts(project, arms, name, metric, higher))
        for name, metric, higher in names.values_list("name", "metric", "higher_is_better")[:MOST_TASKS]
    ]
    template = (
        "pages/_evaluations.html" if request.headers.get("HX-Target") == "tasks" else "pages/evaluations.html"
    )
    return page(request, project, "evaluations", template, {"tasks": tasks})


def _verdicts(project: Project, arms: Arms, name: str, metric: str, higher: bool) -> list[Verdict]:
    rows = EvaluationComparison.objects.filter(run__project=project, name=name, metric=metric)
    newest = rows.select_related("run").order_by("-step", "-run__created_at")[: MOST_RUNS * 4]
    return [_verdict(row, arms, higher) for row in newest]


def _verdict(row: EvaluationComparison, arms: Arms, higher: bool) -> Verdict:
    judgement = judged_now(row.run, row)
    return Verdict(
        row,
        arms.of(row.run),
        score_badge(judgement, higher_is_better=higher),
        dict(row.result),
        in_short(judgement.coverage),
        judgement.reason,
    )


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
        items = np.asarray(evaluation.items, np.float64)
        if not len(items) or not np.isfinite(items).all():
            continue
        low = high = None
        try:
            score = Score(items, evaluation.item_ids, evaluation.clusters)
            (low, high), _ = item_interval(score, alpha, proportion=evaluation.kind == "proportion")
        except ValueError:
            # Too few items for an interval: the point is drawn without one.
            pass
        points[str(evaluation.run_id), evaluation.step] = ScorePoint(
            evaluation.step,
            evaluation.run.name,
            labels[str(evaluation.run_id)],
            arms.of(evaluation.run).slot,
            float(items.mean()),
            low,
            high,
        )
    return list(points.values())


def _bands(project: Project, name: str, metric: str, steps: Sequence[int]) -> list[ScoreBand]:
    """The baseline's interval at evaluation checkpoint, from the newest comparison there."""
    rows = EvaluationComparison.objects.filter(
        run__project=project, name=name, metric=metric, step__in=steps
    ).order_by("step", "run__created_at")
    bands: dict[int, ScoreBand] = {}
    for step, result in rows.values_list("step", "result"):
        interval = result.get("baseline_interval")
        if interval:
            bands[step] = ScoreBand(step, float(interval[0]), float(interval[1]))
    return list(bands.values())
