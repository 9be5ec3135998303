"""Compute and store the comparisons of runs and of their evaluations."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.alignment import Curve
from fp8scope_dashboard.analysis.coverage import Coverage, conclude
from fp8scope_dashboard.analysis.delta import compare_losses
from fp8scope_dashboard.analysis.judging import coverage_of_loss, coverage_of_score
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.analysis.scores import Score, compare_scores
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries

# While a run is running, its comparison may take at most this share of a worker's time ...
TIME_SHARE = 0.05
# ... and happens at most this often. The sweeper finds comparisons that were postponed.
LEAST_INTERVAL = timedelta(seconds=2)

# (name, metric, step): evaluations with the same task are comparable.
Task = tuple[str, str, int]


def refresh(run_id: UUID) -> None:
    """Update the comparisons that depend on this run: its own, and those that it is part of.

    Repeated and concurrent calls do no harm: each computes from the stored data and records its inputs.
    """
    run = Run.objects.select_related("project", "comparison").filter(pk=run_id).first()
    if run is None:
        return
    affected = [
        run,
        *Run.objects.select_related("project", "comparison").filter(pk__in=lineage.dependents(run)),
    ]
    for each in affected:
        if each.baseline:
            compare_evaluations(each.id)
            if not _is_postponed(each):
                compare(each.id)


def compare(run_id: UUID) -> Comparison | None:
    """Compare the run's loss with its baseline group's; computed again only if its inputs have changed.

    None if the run does not exist or names no baseline.
    """
    run = Run.objects.select_related("project", "comparison").filter(pk=run_id).first()
    if run is None or not run.baseline:
        return None
    inputs = lineage.inputs_of(run)
    latest: Comparison | None = getattr(run, "comparison", None)
    if latest is not None and latest.inputs == inputs:
        return latest
    began = time.perf_counter()
    arm, baseline = [run, *lineage.siblings(run)], lineage.baseline_runs(run)
    ours, theirs = ([read_curve(each.id) for each in runs] for runs in (arm, baseline))
    result = compare_losses(ours, theirs, margin=run.project.margin, alpha=run.project.alpha)
    judgement = conclude(result.verdict, coverage_of_loss(arm, baseline, ours, theirs, result))
    comparison, _ = Comparison.objects.update_or_create(
        run=run,
        defaults={
            "baseline": run.baseline,
            "to_step": run.last_step or 0,
            "verdict": judgement.verdict,
            "result": {**result.as_dict(), **judgement.as_dict()},
            "inputs": inputs,
            "seconds": time.perf_counter() - began,
            "computed_at": timezone.now(),
        },
    )
    run_changed(run.id, run.project_id, "comparison", run.last_step)
    return comparison


def read_curve(run_id: UUID) -> Curve:
    """A run's loss, with tokens if it logs them at every step that has a loss."""
    loss = queries.scalar(run_id, "loss")
    tokens = queries.scalar(run_id, "tokens")
    indices = np.searchsorted(tokens.steps, loss.steps)
    known = len(tokens) > 0 and bool((indices < len(tokens)).all())
    if known and np.array_equal(tokens.steps[indices], loss.steps):
        return Curve(loss.steps, loss.values, tokens.values[indices])
    return Curve(loss.steps, loss.values)


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


def _is_postponed(run: Run) -> bool:
    """Whether the last comparison of the run is too recent, given its cost."""
    latest: Comparison | None = getattr(run, "comparison", None)
    if latest is None or run.state != RunState.RUNNING:
        return False
    pause = max(LEAST_INTERVAL, timedelta(seconds=latest.seconds / TIME_SHARE))
    return timezone.now() < latest.computed_at + pause
