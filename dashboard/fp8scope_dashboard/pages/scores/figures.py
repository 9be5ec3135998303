"""The charts of one task of the evaluations: its scores, and the differences to BF16, by checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from django.http import QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.score_comparisons import score_of
from fp8scope_dashboard.analysis.scores.evidence import item_interval
from fp8scope_dashboard.analysis.scores.metrics import limits_of
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.pages.charts.addresses import figure_view
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.arms import Arms, arm_labels
from fp8scope_dashboard.pages.charts.series import Options
from fp8scope_dashboard.pages.formatting import number
from fp8scope_dashboard.pages.scores.checkpoint_figures import (
    CheckpointPoint,
    Zone,
    differences_figure,
    scores_figure,
)
from fp8scope_dashboard.pages.scores.forest import comparisons_of, signed

# The charts show the newest of each.
MAX_RUNS: Final = 12
MAX_CHECKPOINTS: Final = 12


@figure_view
def scores(project: Project, query: QueryDict) -> AnyChart:
    """The chart of one task: `?name=...&metric=...`."""
    options = Options.of(query)
    name, metric = query.get("name", "")[:128], query.get("metric", "")[:64]
    rows = Evaluation.scores.filter(
        run__project=project, run__deleted_at=None, name=name, metric=metric
    ).select_related("run")
    steps = sorted(set(rows.order_by().values_list("step", flat=True).distinct()))[-MAX_CHECKPOINTS:]
    runs = list(rows.order_by().values_list("run_id", "run__created_at").distinct())
    newest = [run_id for run_id, _ in sorted(runs, key=lambda pair: pair[1])[-MAX_RUNS:]]
    shown = list(
        rows.filter(step__in=steps, run_id__in=newest).order_by("run__created_at", "run_id", "step", "seq")
    )
    if not shown:
        return EmptyChart("No scores yet. Log them with run.log_eval(…).")
    points = _points(shown, Arms(project), project.alpha)
    bands = _bands(project, name, metric, steps)
    drawn = scores_figure(points, bands, options.theme, y_title=metric, compact=options.compact)
    last = [point for point in points if point.step == steps[-1]]
    listed = "; ".join(f"{point.name} {number(point.value)}" for point in last)
    return Chart(drawn, f"{name}, {metric} at step {steps[-1]:,}: {listed}.")


@figure_view
def differences(project: Project, query: QueryDict) -> AnyChart:
    """The paired differences of one task: `?name=...&metric=...`."""
    options = Options.of(query)
    name, metric = query.get("name", "")[:128], query.get("metric", "")[:64]
    rows = list(comparisons_of(project, name, metric).order_by("-step")[: MAX_RUNS * MAX_CHECKPOINTS])
    points, margins = _differences(rows, Arms(project))
    if not points:
        return EmptyChart(
            "No difference yet. It needs an FP8 run and its baseline, evaluated at the same step."
        )
    in_percent = Evaluation.scores.filter(
        run__project=project, name=name, metric=metric, kind="proportion"
    ).exists()
    drawn = differences_figure(points, margins, options.theme, in_percent=in_percent, compact=options.compact)
    last = max(point.step for point in points)
    listed = "; ".join(
        f"{point.name} {signed(point.value, in_percent=in_percent)}" for point in points if point.step == last
    )
    return Chart(drawn, f"Difference to BF16 of {name}, {metric} at step {last:,}: {listed}.")


def _differences(
    rows: Sequence[EvaluationComparison], arms: Arms
) -> tuple[list[CheckpointPoint], list[Zone]]:
    """The comparisons that have a difference, oldest run and checkpoint first, and the margins."""
    labels = arm_labels(arms, {row.run_id: row.run for row in rows}.values())
    points: list[CheckpointPoint] = []
    margins: dict[int, float] = {}
    groups: set[tuple[str, str, int]] = set()
    for row in sorted(rows, key=lambda row: (row.run.created_at, str(row.run_id), row.step)):
        interval, difference = row.result.get("difference_interval"), row.result.get("difference")
        margin = row.result.get("margin")
        if interval is None or difference is None or margin is None:
            continue
        runs = (row.result.get("group") or {}).get("runs", ())
        if len(runs) > 1:
            # The interval is that of the group: one mark for all of its runs.
            key = (row.run.group, row.run.baseline, row.step)
            if key in groups:
                continue
            groups.add(key)
        low, high = float(interval[0]), float(interval[1])
        if not all(math.isfinite(value) for value in (low, high, difference, margin)):
            continue
        run, arm = str(row.run_id), arms.of(row.run)
        name, line = (
            (row.run.group, f"{row.run.group} {row.run.baseline}") if len(runs) > 1 else (row.run.name, run)
        )
        points.append(
            CheckpointPoint(
                step=row.step,
                name=name,
                arm=labels[run],
                slot=arm.slot,
                value=float(difference),
                low=low,
                high=high,
                run=line,
            )
        )
        margins[row.step] = max(margins.get(row.step, 0.0), float(margin))
    return points, [Zone(step, -margin, margin) for step, margin in margins.items()]


def _points(evaluations: Sequence[Evaluation], arms: Arms, alpha: float) -> list[CheckpointPoint]:
    """One point per run and checkpoint. If a checkpoint was evaluated twice, the latest counts."""
    points: dict[tuple[str, int], CheckpointPoint] = {}
    labels = arm_labels(arms, {evaluation.run_id: evaluation.run for evaluation in evaluations}.values())
    for evaluation in evaluations:
        score = score_of(evaluation)
        if not len(score.items) or not np.isfinite(score.items).all():
            continue
        low, high = interval_of(evaluation, alpha) or (None, None)
        points[str(evaluation.run_id), evaluation.step] = CheckpointPoint(
            step=evaluation.step,
            name=evaluation.run.name,
            arm=labels[str(evaluation.run_id)],
            slot=arms.of(evaluation.run).slot,
            value=float(score.items.mean()),
            low=low,
            high=high,
            run=str(evaluation.run_id),
        )
    return list(points.values())


def interval_of(evaluation: Evaluation, alpha: float) -> tuple[float, float] | None:
    """The interval of one run's score, over its items; None with too few items, or where none is reliable."""
    score, proportion = score_of(evaluation), evaluation.kind == "proportion"
    if not len(score.items) or not np.isfinite(score.items).all():
        return None
    limits = limits_of(evaluation.kind, evaluation.metric, score.items)
    try:
        (low, high), _ = item_interval(score, alpha, proportion=proportion, limits=limits)
    except ValueError:
        return None
    return (float(low), float(high)) if np.isfinite([low, high]).all() else None


def _bands(project: Project, name: str, metric: str, steps: Sequence[int]) -> list[Zone]:
    """The baseline's interval at each checkpoint, from the newest comparison there."""
    rows = EvaluationComparison.objects.filter(
        run__project=project, run__deleted_at=None, name=name, metric=metric, step__in=steps
    ).order_by("step", "run__created_at")
    bands: dict[int, Zone] = {}
    for step, result in rows.values_list("step", "result"):
        interval = result.get("baseline_interval")
        if interval:
            bands[step] = Zone(step, float(interval[0]), float(interval[1]))
    return list(bands.values())
