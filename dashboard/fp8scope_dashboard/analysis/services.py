"""Update the stored comparisons that depend on a run."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.utils import timezone

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations
from fp8scope_dashboard.runs.models import Run, RunState

# While a run is running, its comparison may take at most this share of a worker's time ...
TIME_SHARE = 0.05
# ... and happens at most this often. The sweeper finds comparisons that were postponed.
MIN_INTERVAL = timedelta(seconds=2)


def refresh(run_id: UUID) -> None:
    """Update the comparisons that depend on this run: its own, and those that it is part of.

    Repeated and concurrent calls do no harm: each computes from the stored data and records its inputs.
    """
    # The stored results are large, and not needed.
    runs = Run.objects.select_related("project", "comparison").defer("comparison__result")
    run = runs.filter(pk=run_id).first()
    if run is None:
        return
    affected = [run, *runs.filter(pk__in=comparison_runs.dependents(run))]
    for affected_run in affected:
        if affected_run.baseline:
            compare_evaluations(affected_run.id)
            if not _is_postponed(affected_run):
                compare(affected_run.id)


def _is_postponed(run: Run) -> bool:
    """Return whether the last comparison of the run is too recent, given its cost."""
    latest: Comparison | None = getattr(run, "comparison", None)
    if latest is None or run.state != RunState.RUNNING:
        return False
    pause = max(MIN_INTERVAL, timedelta(seconds=latest.seconds / TIME_SHARE))
    return timezone.now() < latest.computed_at + pause
