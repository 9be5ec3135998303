"""The coverage of a verdict from stored runs, and a stored verdict for the current state of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.coverage import (
    GOOD,
    PENDING,
    BaselineArm,
    Coverage,
    Judgement,
    Plan,
    Standing,
    conclude,
    is_dead,
    standing_of,
)
from fp8scope_dashboard.analysis.loss_coverage import RunStanding, coverage_of_arms
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.runs.models import Run, RunState


def coverage_of_loss(
    arm: Sequence[Run],
    baseline: Sequence[Run],
    ours: Sequence[LossCurve],
    theirs: Sequence[LossCurve],
    result: LossComparison,
) -> Coverage:
    """Return how much of the first run's plan the comparison of its loss covers.

    Args:
        arm: the judged run first, then others of its seed group; `ours` are their losses.
        baseline: the runs of the baseline group; `theirs` are their losses.
        result: of their comparison, in this order.
    """
    reached = comparison_runs.reached_steps([*arm, *baseline])
    return coverage_of_arms(
        [standing_facts(run, reached) for run in arm],
        [standing_facts(run, reached) for run in baseline],
        ours,
        theirs,
        result,
    )


def standing_facts(run: Run, reached: Mapping[UUID, int | None]) -> RunStanding:
    """Return what a coverage needs of a stored run; `reached` is `comparison_runs.reached_steps`."""
    return RunStanding(
        state=run.state, reached=reached[run.id], planned=run.total_steps, dropped=run.rows_dropped
    )


def coverage_of_score(
    run: Run, baseline: Sequence[Run], reached: Mapping[UUID, int | None], step: int
) -> Coverage:
    """Return how much of the run's plan a score at a step covers.

    `baseline`: the runs with a score at that step.
    """
    furthest = [reached[member.id] for member in baseline]
    plan: Plan = "total_steps" if run.total_steps else "longest_run"
    # The length of a run without a plan is known once it has ended.
    lengths = [
        float(member.total_steps or (0 if member.state == RunState.RUNNING else reached[member.id]) or 0)
        for member in (run, *baseline)
    ]
    return Coverage(
        standing=standing_of(run.state, reached[run.id], run.total_steps),
        judged=float(step),
        planned=float(run.total_steps) if run.total_steps else max(float(step), *lengths),
        plan=plan,
        reached=reached[run.id],
        waits=any(member.state == RunState.RUNNING for member in baseline),
        baseline=BaselineArm(
            tuple(_standing(member, reached) for member in baseline),
            max((step for step in furthest if step is not None), default=None),
        ),
    )


def judged_now(run: Run, comparison: Comparison | EvaluationComparison) -> Judgement:
    """The judgement of a stored comparison for the current state of the run.

    The run may have failed or gone silent since it was compared. The verdict must show that at once, without
    waiting for a worker.
    """
    measured = str(comparison.result.get("measured", comparison.verdict))
    stored = comparison.result.get("coverage")
    if stored is None:
        return _without_coverage(run, measured)
    coverage = Coverage.from_dict(stored)
    is_stale = isinstance(comparison, Comparison) and comparison.to_step < (run.last_step or 0)
    reached = run.last_step if is_stale or coverage.reached is None else coverage.reached
    planned = coverage.planned
    if run.total_steps:
        planned = float(run.total_steps) if coverage.plan == "total_steps" else planned
    elif coverage.unit == "steps" and planned is not None and run.state != RunState.RUNNING:
        planned = max(planned, float(reached or 0))
    now = replace(
        coverage,
        standing=standing_of(run.state, reached, run.total_steps, coverage.cadence),
        reached=reached,
        planned=planned,
        waits=coverage.waits or is_stale,
        missing=max(coverage.missing, min(run.rows_dropped, coverage.logged)),
    )
    return conclude(measured, now)


def standing_now(run: Run) -> Standing:
    """The standing of a run from its row and its comparison; needs no query if the comparison is loaded."""
    comparison = getattr(run, "comparison", None)
    stored = (comparison.result.get("coverage") or {}) if comparison is not None else {}
    reached = run.last_step
    if comparison is not None and comparison.to_step >= (run.last_step or 0) and "reached" in stored:
        reached = stored["reached"]
    # Without a comparison, the number of rows shows how often the run logs; several ranks log more rows.
    every = float(stored.get("cadence") or -(-((reached or 0) + 1) // max(1, run.rows_stored)))
    return standing_of(run.state, reached, run.total_steps, max(1.0, every))


def _without_coverage(run: Run, measured: str) -> Judgement:
    """The judgement of a comparison by an earlier version, without coverage. The sweeper repeats it."""
    standing = standing_of(run.state, run.last_step, run.total_steps)
    judgement = conclude(measured, Coverage(standing=standing, reached=run.last_step))
    if is_dead(standing) or measured not in GOOD:
        return judgement
    return replace(judgement, verdict=PENDING, reason="The run is being compared again.")


def _standing(run: Run, reached: Mapping[UUID, int | None], gap: float = 1.0) -> Standing:
    return standing_of(run.state, reached[run.id], run.total_steps, gap)
