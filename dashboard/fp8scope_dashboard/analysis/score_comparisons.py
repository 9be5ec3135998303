"""Compare the scores of runs with those of their baselines, and store the results."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from uuid import UUID

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.coverage import Coverage, conclude
from fp8scope_dashboard.analysis.judging import coverage_of_score
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.scores import Score, compare_scores
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run

# (name, metric, step): evaluations with the same task are comparable.
Task = tuple[str, str, int]


def compare_evaluations(run_id: UUID) -> list[EvaluationComparison]:
    """Compare the run's scores with its baseline group's at the same steps, where inputs have changed.

    Returns the computed comparisons. Of several scores of a run for the same task, the latest counts.
    """
    run = Run.objects.select_related("project").filter(pk=run_id).first()
    if run is None or not run.baseline:
        return []
    baseline = {each.id: each for each in lineage.baseline_runs(run)}
    ours, theirs = _latest_scores([run.id])[run.id], _latest_scores(list(baseline))
    reached = lineage.reached_steps([run, *baseline.values()])
    known = {
        (row.name, row.metric, row.step): row.inputs
        for row in EvaluationComparison.objects.filter(run=run).only("name", "metric", "step", "inputs")
    }
    computed = []
    for task, mine in ours.items():
        scored = [each for each in baseline.values() if task in theirs[each.id]]
        references = [theirs[each.id][task] for each in scored]
        coverage = coverage_of_score(run, scored, reached, task[-1])
        inputs = _digest([mine, *references], run.project.alpha, coverage)
        if known.get(task) != inputs:
            computed.append(_compare_scores(run, task, mine, references, inputs, coverage))
    if computed:
        run_changed(run.id, run.project_id, "comparison", run.last_step)
    return computed


def _latest_scores(run_ids: Sequence[UUID]) -> dict[UUID, dict[Task, int]]:
    """Ids of the latest evaluations by run and task."""
    latest: dict[UUID, dict[Task, int]] = defaultdict(dict)
    rows = Evaluation.objects.filter(run_id__in=run_ids).order_by("id")
    for pk, run_id, name, metric, step in rows.values_list("id", "run_id", "name", "metric", "step"):
        latest[run_id][name, metric, step] = pk
    return latest


def _digest(evaluations: Iterable[int], alpha: float, coverage: Coverage) -> str:
    # Without `reached`, which changes with every row of a running run: its scores would always be compared
    # again.
    steady = replace(coverage, reached=None, baseline=replace(coverage.baseline, reached=None))
    return hashlib.sha256(f"{list(evaluations)} {alpha} {steady}".encode()).hexdigest()


def _compare_scores(
    run: Run, task: Task, mine: int, references: Sequence[int], inputs: str, coverage: Coverage
) -> EvaluationComparison:
    evaluations = Evaluation.objects.in_bulk([mine, *references])
    result = compare_scores(
        _score(evaluations[mine]),
        [_score(evaluations[reference]) for reference in references],
        proportion=evaluations[mine].kind == "proportion",
        alpha=run.project.alpha,
        higher_is_better=evaluations[mine].higher_is_better,
    )
    judgement = conclude(result.verdict, coverage)
    name, metric, step = task
    comparison, _ = EvaluationComparison.objects.update_or_create(
        run=run,
        name=name,
        metric=metric,
        step=step,
        defaults={
            "verdict": judgement.verdict,
            "result": {**result.as_dict(), **judgement.as_dict()},
            "inputs": inputs,
            "computed_at": timezone.now(),
        },
    )
    return comparison


def _score(evaluation: Evaluation) -> Score:
    items = np.asarray(evaluation.items, dtype=np.float64)
    return Score(items, evaluation.item_ids, evaluation.clusters)
