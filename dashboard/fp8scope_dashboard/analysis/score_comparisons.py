"""Compare the scores of runs with those of their baselines, and store the results."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.coverage import GOOD, BaselineArm, Coverage, conclude
from fp8scope_dashboard.analysis.losses.seeds import Prior, pooled_prior
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.analysis.own_differences import as_dict, sentences
from fp8scope_dashboard.analysis.scores import precision
from fp8scope_dashboard.analysis.scores.result import METHOD_VERSION, RunScore, ScoreComparison, TaskScores
from fp8scope_dashboard.analysis.scores.seeds import SeedGroup
from fp8scope_dashboard.analysis.scores.spending import shares
from fp8scope_dashboard.analysis.scores.summary import ScoreSummary, summarise
from fp8scope_dashboard.analysis.scores.verdict import judge
from fp8scope_dashboard.analysis.verdict_coverage import coverage_of_score, judged_now
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, RunState

# The project's other groups whose seeds count: the newest, if there are more.
MAX_GROUPS = 64
# (name, metric): evaluations with the same name and metric are comparable.
TaskName = tuple[str, str]
# Ids of the latest evaluations, by run, step and task.
Latest = Mapping[UUID, Mapping[int, Mapping[TaskName, int]]]


@dataclass(frozen=True)
class _Checkpoint:
    """The number of a checkpoint among those of its run, from 1, and its share of alpha."""

    number: int = 1
    share: float = 1.0


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
    siblings, baselines = comparison_runs.siblings(run), comparison_runs.baseline_runs(run)
    latest = _latest_scores([member.id for member in (run, *siblings, *baselines)])
    reached = comparison_runs.reached_steps([run, *baselines])
    rows = EvaluationComparison.objects.filter(run=run).only("name", "metric", "step", "inputs")
    inputs = {(row.name, row.metric, row.step): row.inputs for row in rows}
    checkpoints = _checkpoints(run, baselines, latest)
    names = {member.id: member.name for member in (run, *siblings, *baselines)}
    computed = []
    for step in sorted(latest[run.id]):
        tasks = _inputs_at(step, run, siblings, baselines, latest, reached)
        checkpoint = checkpoints.get(step, _Checkpoint())
        digest = _digest(tasks, checkpoint, run.project.alpha, run.equivalence_margin)
        if any(inputs.get((*task.name, step)) != digest for task in tasks):
            computed += _compare_step(run, step, tasks, checkpoint, names, digest)
    if computed:
        run_changed(run.id, run.project_id, "comparison", run.last_step)
    return computed


def summary_of(run: Run, rows: Sequence[EvaluationComparison]) -> ScoreSummary:
    """One verdict over the comparisons of a run at one step, for the current state of the run.

    As for a single score, an equivalence on a part of the run is `pending` or `incomplete`.
    """
    judged = [judged_now(run, row) for row in rows]
    named = [f"{row.name} {row.metric}" for row in rows]
    measured = [judgement.measured for judgement in judged]
    summary = summarise(list(zip(named, measured, strict=True)), run.project.alpha)
    in_part = next((task for task in judged if task.verdict != task.measured), None)
    if in_part is None or summary.verdict not in GOOD:
        return summary
    return replace(summary, verdict=in_part.verdict, explanation=f"{summary.explanation} {in_part.reason}")


def _latest_scores(run_ids: Sequence[UUID]) -> Latest:
    latest: dict[UUID, dict[int, dict[TaskName, int]]] = defaultdict(lambda: defaultdict(dict))
    rows = Evaluation.scores.filter(run_id__in=run_ids).order_by("id")
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
        scored = [member for member in baselines if name in latest[member.id][step]]
        others = [latest[sibling.id][step][name] for sibling in siblings if name in latest[sibling.id][step]]
        references = [latest[member.id][step][name] for member in scored]
        coverage = coverage_of_score(run, scored, reached, step)
        tasks.append(_Inputs(name, [mine, *others], references, coverage))
    return tasks


def _checkpoints(run: Run, baselines: Sequence[Run], latest: Latest) -> dict[int, _Checkpoint]:
    """The tested checkpoints by step: those at which a baseline run has a score of the same task."""
    steps = [
        step
        for step, tasks in sorted(latest[run.id].items())
        if any(name in latest[member.id][step] for member in baselines for name in tasks)
    ]
    parts = shares(steps, run.total_steps, ended=run.state != RunState.RUNNING)
    return {
        step: _Checkpoint(number, part)
        for number, (step, part) in enumerate(zip(steps, parts, strict=True), start=1)
    }


def _digest(tasks: Sequence[_Inputs], checkpoint: _Checkpoint, alpha: float, margin: float) -> str:
    # Without `reached`, which changes with every row of a running run: its scores would always be compared
    # again.
    steady = [
        (task.arm, task.baselines, replace(task.coverage, reached=None, baseline=_steady(task.coverage)))
        for task in tasks
    ]
    return hashlib.sha256(f"{METHOD_VERSION} {alpha} {margin} {checkpoint} {steady}".encode()).hexdigest()


def _steady(coverage: Coverage) -> BaselineArm:
    return replace(coverage.baseline, reached=None)


def _compare_step(
    run: Run,
    step: int,
    tasks: Sequence[_Inputs],
    checkpoint: _Checkpoint,
    names: Mapping[UUID, str],
    digest: str,
) -> list[EvaluationComparison]:
    stored = Evaluation.objects.in_bulk([pk for task in tasks for pk in task.ids])
    losses, groups = _loss_prior(run), _other_groups(run, [task.name for task in tasks])
    results = judge(
        [
            replace(_task(inputs, stored, names), losses=losses, groups=groups.get(inputs.name, ()))
            for inputs in tasks
        ],
        alpha=run.project.alpha,
        loss_margin=run.equivalence_margin,
        checkpoint=checkpoint.number,
        alpha_share=checkpoint.share,
    )
    return [
        _store(run, step, inputs, _with_warnings(run, inputs, stored, result), stored, digest)
        for inputs, result in zip(tasks, results, strict=True)
    ]


def _loss_prior(run: Run) -> Prior:
    """The spread of the training loss between seeds, from all groups of the project."""
    rows = Comparison.objects.filter(run__project_id=run.project_id).order_by("-computed_at")
    stored = rows.values_list("baseline", "result__baseline_losses")[:MAX_GROUPS]
    groups = {baseline: losses for baseline, losses in stored if losses}
    return pooled_prior([np.array(losses, np.float64) for losses in groups.values()])


def _other_groups(run: Run, tasks: Sequence[TaskName]) -> dict[TaskName, list[SeedGroup]]:
    """The seeds of the project's other groups on these tasks, each at the last checkpoint with own seeds."""
    rows = EvaluationComparison.objects.filter(
        run__project_id=run.project_id,
        name__in={name for name, _ in tasks},
        result__seed_spread__source="own",
        result__baseline_score__isnull=False,
    ).exclude(run__baseline=run.baseline)
    fields = rows.order_by("name", "metric", "run__baseline", "-step", "-computed_at").distinct(
        "name", "metric", "run__baseline"
    )
    groups: dict[TaskName, list[SeedGroup]] = defaultdict(list)
    for name, metric, score, spread in fields.values_list(
        "name", "metric", "result__baseline_score", "result__seed_spread"
    )[: MAX_GROUPS * len(tasks)]:
        variance, freedom = spread.get("own") or (0.0, 0.0)
        if freedom:
            excess = max(0.0, variance - spread["by_items"])
            groups[name, metric].append(SeedGroup(float(score), excess, float(freedom)))
    return groups


def _task(inputs: _Inputs, stored: Mapping[int, Evaluation], names: Mapping[UUID, str]) -> TaskScores:
    mine = stored[inputs.arm[0]]
    margins = [stored[pk].margin for pk in inputs.ids]
    return TaskScores(
        name=mine.name,
        metric=mine.metric,
        kind=mine.kind,
        higher_is_better=mine.higher_is_better,
        arm=[score_of(stored[pk], names[stored[pk].run_id]) for pk in inputs.arm],
        baselines=[score_of(stored[pk], names[stored[pk].run_id]) for pk in inputs.baselines],
        margin=next((margin for margin in margins if margin is not None), None),
    )


def score_of(evaluation: Evaluation, name: str = "") -> RunScore:
    """The stored scores as arrays, with the id of their run and its name if it is given."""
    items = np.asarray(evaluation.items, dtype=np.float64)
    return RunScore(items, evaluation.item_ids, evaluation.clusters, str(evaluation.run_id), name)


def _with_warnings(
    run: Run, inputs: _Inputs, stored: Mapping[int, Evaluation], result: ScoreComparison
) -> ScoreComparison:
    baseline = [stored[pk].precision for pk in inputs.baselines]
    of_precision = precision.warnings_of(run.precision, stored[inputs.arm[0]].precision, baseline)
    left = sentences(result.own, _unit(stored[inputs.arm[0]]))
    return replace(result, warnings=[*left, *result.warnings, *of_precision])


def _unit(evaluation: Evaluation) -> str:
    """The unit of the differences of a score, as sentences name it."""
    return "share" if evaluation.kind == "proportion" else "score"


def _store(
    run: Run,
    step: int,
    inputs: _Inputs,
    result: ScoreComparison,
    stored: Mapping[int, Evaluation],
    digest: str,
) -> EvaluationComparison:
    judgement = conclude(result.verdict, inputs.coverage)
    own = as_dict(run.group, result.own, str(run.id), _unit(stored[inputs.arm[0]]))
    name, metric = inputs.name
    comparison, _ = EvaluationComparison.objects.update_or_create(
        run=run,
        name=name,
        metric=metric,
        step=step,
        defaults={
            "verdict": judgement.verdict,
            "own_difference": own["own"]["difference"],
            "result": {**result.as_dict(), **own, **judgement.as_dict()},
            "inputs": digest,
            "computed_at": timezone.now(),
        },
    )
    return comparison
