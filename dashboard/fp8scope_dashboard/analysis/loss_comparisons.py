"""Compare the losses of runs with those of their baselines, and store the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.coverage import conclude
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.seeds import Prior, pooled_prior
from fp8scope_dashboard.analysis.losses.verdict import compare_losses
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.analysis.own_differences import (
    RunDifference,
    as_dict,
    ends_broken,
    of_losses,
    sentences,
)
from fp8scope_dashboard.analysis.progress import progress
from fp8scope_dashboard.analysis.quantity_comparisons import quantities_of
from fp8scope_dashboard.analysis.reading import read_arms
from fp8scope_dashboard.analysis.verdict_coverage import coverage_of_loss
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, RunState

# Comparisons whose baselines give the project's spread between seeds: the newest, if there are more.
MAX_GROUPS = 64


def compare(run_id: UUID) -> Comparison | None:
    """Compare the run's loss with its baseline group's; computed again only if its inputs have changed.

    None if the run does not exist or names no baseline.
    """
    # The stored result is large, and not needed.
    runs = Run.objects.select_related("project", "comparison").defer("comparison__result")
    run = runs.filter(pk=run_id).first()
    if run is None or not run.baseline:
        return None
    inputs = comparison_runs.inputs_of(run)
    latest: Comparison | None = getattr(run, "comparison", None)
    if latest is not None and latest.inputs == inputs:
        return latest
    began = time.perf_counter()
    arm, baseline = [run, *comparison_runs.siblings(run)], comparison_runs.baseline_runs(run)
    with progress(run.id, "comparison", expected_seconds=latest.seconds if latest else 0.0) as report:
        report("Reading the losses", 0.0)
        mine, others = read_arms([reading.id for reading in arm], [reading.id for reading in baseline])
        ours, theirs = (
            [planned_curve(reading.curve, member) for reading, member in zip(readings, runs, strict=True)]
            for readings, runs in ((mine, arm), (others, baseline))
        )
        report("Comparing the losses", 0.7)
        prior = project_prior(run)
        result = compare_losses(
            ours,
            theirs,
            margin=run.equivalence_margin,
            margin_nats=run.margin_nats,
            alpha=run.project.alpha,
            prior=prior,
        )
        judgement = conclude(result.verdict, coverage_of_loss(arm, baseline, ours, theirs, result))
        report("Computing costs and savings", 0.9)
        stored = result.as_dict()
        quantities = quantities_of(run, mine, others, stored)
    differences = _own_differences(arm, ours, theirs, result, prior)
    own = as_dict(run.group, differences, str(run.id), result.unit)
    stored["warnings"] = [*stored["warnings"], *sentences(differences, result.unit)]
    values = {
        "baseline": run.baseline,
        "to_step": run.last_step or 0,
        "verdict": judgement.verdict,
        "own_difference": own["own"]["difference"],
        "result": {**stored, **own, **judgement.as_dict(), "quantities": quantities},
        "inputs": inputs,
        "seconds": time.perf_counter() - began,
        "computed_at": timezone.now(),
    }
    # The usual case is one statement that does not read the row.
    if not Comparison.objects.filter(run=run).update(**values):
        Comparison.objects.update_or_create(run=run, defaults=values)
    run_changed(run.id, run.project_id, "comparison", run.last_step)
    return Comparison(run=run, **values)


def project_prior(run: Run) -> Prior:
    """The spread between seeds of the project's other baseline groups, for a run with few seeds."""
    others = Comparison.objects.filter(run__project_id=run.project_id).exclude(baseline=run.baseline)
    stored = others.order_by("-computed_at").values_list("baseline", "result__baseline_losses")
    groups = {baseline: losses for baseline, losses in stored[:MAX_GROUPS] if losses}
    return pooled_prior([np.array(losses, np.float64) for losses in groups.values()])


def _own_differences(
    arm: Sequence[Run],
    ours: Sequence[LossCurve],
    theirs: Sequence[LossCurve],
    result: LossComparison,
    prior: Prior,
) -> list[RunDifference]:
    """The differences of the runs of an arm. Those that diverged leave no difference of the others: these are
    then compared without them.
    """
    named = [RunDifference(run=str(run.id), name=run.name, seed=run.seed) for run in arm]
    healthy = [i for i, curve in enumerate(ours) if not ends_broken(curve)]
    if result.delta is not None or 0 not in healthy or len(healthy) == len(arm):
        return of_losses(named, ours, result, prior)
    rest = compare_losses(
        [ours[i] for i in healthy],
        theirs,
        margin=arm[0].equivalence_margin,
        margin_nats=arm[0].margin_nats,
        alpha=arm[0].project.alpha,
        prior=prior,
    )
    others = of_losses([named[i] for i in healthy], [ours[i] for i in healthy], rest, prior)
    return [*others, *(replace(run, left=True) for i, run in enumerate(named) if i not in healthy)]


def planned_curve(curve: LossCurve, run: Run) -> LossCurve:
    """Return the curve with its run's name and the end of its schedule."""
    planned = run.total_steps
    if not planned and run.state == RunState.FINISHED and len(curve):
        planned = int(curve.steps[-1])
    return replace(curve, planned=planned, name=run.name)
