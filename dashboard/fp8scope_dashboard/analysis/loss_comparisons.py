"""Compare the losses of runs with those of their baselines, and store the results."""

from __future__ import annotations

import time
from uuid import UUID

import numpy as np
from django.utils import timezone

from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.analysis.alignment import Curve
from fp8scope_dashboard.analysis.coverage import conclude
from fp8scope_dashboard.analysis.delta import compare_losses
from fp8scope_dashboard.analysis.judging import coverage_of_loss
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries


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
