"""The coverage of a verdict on a loss, from the standing of the compared runs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8scope_dashboard.analysis.coverage import BaselineArm, Coverage, cadence, missing_steps, standing_of
from fp8scope_dashboard.analysis.losses.alignment import Axis, LossCurve
from fp8scope_dashboard.analysis.losses.result import LossComparison


@dataclass(frozen=True, kw_only=True)
class RunStanding:
    """The facts of a run that the coverage needs.

    Attributes:
        state: a runs.models.RunState.
        reached: the last stored step of its latest attempt; None if it has none.
        planned: its planned steps; None or 0 if unknown.
        dropped: rows that its agent dropped.
    """

    state: str
    reached: int | None
    planned: int | None
    dropped: int = 0

    @property
    def is_running(self) -> bool:
        """Return whether more of it may come."""
        return self.state == "running"


def coverage_of_arms(
    arm: Sequence[RunStanding],
    baseline: Sequence[RunStanding],
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
    run, basis = arm[0], result.basis
    used = list(basis.baselines) if basis else []
    arm_used = [arm[i] for i in basis.runs] if basis else [run]
    own = cadence(ours[0].steps.tolist())
    step_gap = max(basis.step_gap if basis else 1.0, own)
    missing, logged = missing_steps(ours[0].steps.tolist(), run.dropped)
    waiting = (*arm_used, *([baseline[i] for i in used] or baseline))
    coverage = Coverage(
        standing=standing_of(run.state, run.reached, run.planned, own),
        reached=run.reached,
        cadence=own,
        waits=any(member.is_running for member in waiting),
        baseline=_baseline_arm(baseline, theirs, used, is_judged=basis is not None),
        missing=missing,
        logged=logged,
    )
    if run.planned:
        judged = None if basis is None else float(basis.step)
        return replace(coverage, judged=judged, planned=float(run.planned), plan="total_steps", gap=step_gap)
    if basis is None:
        return coverage
    planned = max(_end(curve, result.aligned_on) for curve in (ours[0], *theirs))
    if result.aligned_on == "steps":
        planned = max(planned, *(float(member.planned or 0) for member in baseline))
    return replace(
        coverage,
        judged=basis.end,
        planned=planned,
        plan="longest_run",
        unit=result.aligned_on,
        gap=max(basis.gap, step_gap) if result.aligned_on == "steps" else basis.gap,
    )


def _baseline_arm(
    baseline: Sequence[RunStanding], theirs: Sequence[LossCurve], used: Sequence[int], *, is_judged: bool
) -> BaselineArm:
    members = [(baseline[i], theirs[i].steps.tolist()) for i in used]
    return BaselineArm(
        tuple(
            standing_of(member.state, member.reached, member.planned, cadence(steps))
            for member, steps in members
        ),
        max((member.reached for member, _ in members if member.reached is not None), default=None),
        len(baseline) - len(used) if is_judged else 0,
        max((missing_steps(steps, member.dropped)[0] for member, steps in members), default=0),
    )


def _end(curve: LossCurve, axis: Axis) -> float:
    x = curve.tokens if axis == "tokens" else curve.steps
    return float(x[-1]) if x is not None and len(x) else 0.0
