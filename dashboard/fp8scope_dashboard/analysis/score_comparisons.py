"""Compare the scores of runs with those of their baselines, and store the results."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.coverage import GOOD, BaselineArm, Coverage, conclude
from fp8scope_dashboard.analysis.judging import coverage_of_score, judged_now
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.scores import precision
from fp8scope_dashboard.analysis.scores.summary import Summary, summarise
from fp8scope_dashboard.analysis.scores.verdict import METHOD_VERSION, Score, ScoreComparison, Task, judge
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run

# (name, metric): evaluations with the same name and metric are comparable.
TaskName = tuple[str, str]
# Ids of the latest evaluations, by run, step and task.
Latest = Mapping[UUID, Mapping[int, Mapping[TaskName, int]]]


@dataclass(frozen=True)
class _Inputs:
    """One task at one step: ids of the evaluations, the judged run's first, and what they cover."""

    name: TaskName
    arm: Sequence[int]
    baselines: Sequence[int]
    coverage: Coverage

    @property
    def ids(self) -> list[int]:
        return [*self.arm, *self.baselines]


def compare_evaluations(run_id: UUID) -> list[EvaluationComparison]:
    """Compare the run's scores with its baseline group's at the same steps, where inputs have changed.

    All tasks of a step are one comparison, because their p-values are adjusted together. The other runs of
    the run's seed group take part in the tasks that they have at the step. Returns the computed comparisons.
    Of several scores of a run for the same task, the latest counts.
    """
    run = Run.objects.select_related("project").filter(pk=run_id).first()
    if run is None or not run.baseline:
        return []
    siblings, baselines = lineage.siblings(run), lineage.baseline_runs(run)
    latest = _latest_scores([each.id for each in (run, *siblings, *baselines)])
    reached = lineage.reached_steps([run, *baselines])
    rows = EvaluationComparison.objects.filter(run=run).only("name", "metric", "step", "inputs")
    known = {(row.name, row.metric, row.step): row.inputs for row in rows}
    computed = []
    for step in sorted(latest[run.id]):
        tasks = _inputs_at(step, run, siblings, baselines, latest, reached)
        digest = _digest(tasks, run.project.alpha, run.project.margin)
        if any(known.get((*task.name, step)) != digest for task in tasks):
            computed += _compare_step(run, step, tasks, digest)
    if computed:
        run_changed(run.id, run.project_id, "comparison", run.last_step)
    return computed


def summary_of(run: Run, rows: Sequence[EvaluationComparison]) -> Summary:
    """One verdict over the comparisons of a run at one step, for the current state of the run.

    As for a single score, an equivalence on a part of the run is `pending` or `incomplete`.
    """
    judged = [judged_now(run, row) for row in rows]
    named = [f"{row.name} {row.metric}" for row in rows]
    measured = [judgement.measured for judgement in judged]
    summary = summarise(list(zip(named, measured, strict=True)), run.project.alpha)
    in_part = next((each for each in judged if each.verdict != each.measured), None)
    if in_part is None or summary.verdict not in GOOD:
        return summary
    return replace(summary, verdict=in_part.verdict, explanation=f"{summary.explanation} {in_part.reason}")


def _latest_scores(run_ids: Sequence[UUID]) -> Latest:
    latest: dict[UUID, dict[int, dict[TaskName, int]]] = defaultdict(lambda: defaultdict(dict))
    rows = Evaluation.objects.filter(run_id__in=run_ids).order_by("id")
    for pk, run_id, name, metric, step in rows.values_list("id", "run_id", "name", "metric", "step"):
        latest[run_id][step][name, metric] = pk
    return latest


def _inputs_at(
    step: int,
    run: Run,
    siblings: Sequence[Run],
    baselines: Sequence[Run],
    latest: Latest,
    reached: Mapping[UUID, int | None],
) -> list[_Inputs]:
    tasks = []
    for name, mine in sorted(latest[run.id][step].items()):
        scored = [each for each in baselines if name in latest[each.id][step]]
        others = [latest[each.id][step][name] for each in siblings if name in latest[each.id][step]]
        references = [latest[each.id][step][name] for each in scored]
        coverage = coverage_of_score(run, scored, reached, step)
        tasks.append(_Inputs(name, [mine, *others], references, coverage))
    return tasks


def _digest(tasks: Sequence[_Inputs], alpha: float, margin: float) -> str:
    # Without `reached`, which changes with every row of a running run: its scores would always be compared
    # again.
    steady = [
        (task.arm, task.baselines, replace(task.coverage, reached=None, baseline=_steady(task.coverage)))
        for task in tasks
    ]
    return hashlib.sha256(f"{METHOD_VERSION} {alpha} {margin} {steady}".encode()).hexdigest()


def _steady(coverage: Coverage) -> BaselineArm:
    return replace(coverage.baseline, reached=None)


def _compare_step(run: Run, step: int, tasks: Sequence[_Inputs], digest: str) -> list[EvaluationComparison]:
    stored = Evaluation.objects.in_bulk([pk for task in tasks for pk in task.ids])
    results = judge(
        [_task(inputs, stored) for inputs in tasks], alpha=run.project.alpha, loss_margin=run.project.margin
    )
    return [
        _store(run, step, inputs, _with_warnings(run, inputs, stored, result), digest)
        for inputs, result in zip(tasks, results, strict=True)
    ]


def _task(inputs: _Inputs, stored: Mapping[int, Evaluation]) -> Task:
    mine = stored[inputs.arm[0]]
    margins = [stored[pk].margin for pk in inputs.ids]
    return Task(
        mine.name,
        mine.metric,
        mine.kind,
        mine.higher_is_better,
        [score_of(stored[pk]) for pk in inputs.arm],
        [score_of(stored[pk]) for pk in inputs.baselines],
        next((margin for margin in margins if margin is not None), None),
    )


def score_of(evaluation: Evaluation) -> Score:
    """The stored scores as arrays."""
    items = np.asarray(evaluation.items, dtype=np.float64)
    return Score(items, evaluation.item_ids, evaluation.clusters)


def _with_warnings(
    run: Run, inputs: _Inputs, stored: Mapping[int, Evaluation], result: ScoreComparison
) -> ScoreComparison:
    baseline = [stored[pk].precision for pk in inputs.baselines]
    return replace(
        result, warnings=precision.warnings_of(run.precision, stored[inputs.arm[0]].precision, baseline)
    )


def _store(
    run: Run, step: int, inputs: _Inputs, result: ScoreComparison, digest: str
) -> EvaluationComparison:
    judgement = conclude(result.verdict, inputs.coverage)
    name, metric = inputs.name
    comparison, _ = EvaluationComparison.objects.update_or_create(
        run=run,
        name=name,
        metric=metric,
        step=step,
        defaults={
            "verdict": judgement.verdict,
            "result": {**result.as_dict(), **judgement.as_dict()},
            "inputs": digest,
            "computed_at": timezone.now(),
        },
    )
    return comparison
