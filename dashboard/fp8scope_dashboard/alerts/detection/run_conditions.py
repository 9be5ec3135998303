"""Conditions of the run itself: silent, failed, finished, a rank that is behind. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8scope_dashboard.alerts.detectors import ConditionChange, State
from fp8scope_dashboard.runs.models import RunState

ERROR_LENGTH = 300
# A rank may pause so many times longer than it has before, to write checkpoints, up to so many times the
# limit.
PAUSES, MAX_PAUSES = 2.0, 20.0
# In seconds. The state of a run that was last heard from before that is no news.
NEWS = 86_400.0


@dataclass(frozen=True)
class RankStep:
    """The last stored step of a rank of the latest attempt, in its present generation.

    `ended` once its process has finished.
    """

    rank: int
    last_step: int | None
    ended: bool = False
    generation: str = ""


@dataclass(frozen=True, kw_only=True)
class ConditionFacts:
    """The facts about a run at a time.

    Attributes:
        now: seconds since the epoch.
        heartbeat: when it was last heard from, likewise.
        start: names the latest start of the training.
    """

    state: str
    last_step: int
    now: float
    heartbeat: float
    error: str = ""
    ranks: Sequence[RankStep] = ()
    start: str = ""


def run_silent(
    state: State, run: ConditionFacts, parameters: Mapping[str, float]
) -> tuple[State, list[ConditionChange]]:
    """Open when no process of the run has been heard from for a minute; close when one is."""
    message = (
        f"The run is silent since step {run.last_step:,}: no process was heard from for "
        f"{run.now - run.heartbeat:.0f} s. It was killed, hangs, or has no connection."
    )
    return _while(state, _is(run, RunState.SILENT, state), run, run.last_step, message)


def run_failed(
    state: State, run: ConditionFacts, parameters: Mapping[str, float]
) -> tuple[State, list[ConditionChange]]:
    """Open when a process ends with an error; close when the run is resumed."""
    lines = run.error.strip().splitlines()
    reason = f": {lines[-1][:ERROR_LENGTH]}" if lines else "."
    message = f"The run failed after step {run.last_step:,}{reason}"
    return _while(state, _is(run, RunState.FAILED, state), run, run.last_step, message)


def run_finished(
    state: State, run: ConditionFacts, parameters: Mapping[str, float]
) -> tuple[State, list[ConditionChange]]:
    """Open when the run finishes; close when it is resumed."""
    message = f"The run finished after step {run.last_step:,}."
    return _while(state, _is(run, RunState.FINISHED, state), run, run.last_step, message)


def rank_behind(
    state: State, run: ConditionFacts, parameters: Mapping[str, float]
) -> tuple[State, list[ConditionChange]]:
    """Open when a rank has not reached the step that the fastest rank had `seconds` ago.

    The ranks of a training step together, so this is a process that hangs, or whose data do not arrive. A
    rank that writes checkpoints looks the same, but comes back: twice its longest pause is allowed.
    """
    steps = {rank.rank: rank.last_step or 0 for rank in run.ranks if not rank.ended}
    generations = [[rank.rank, rank.generation] for rank in run.ranks]
    if state.get("generations", generations) != generations:
        # Ranks that have gone back are not behind those that have not yet.
        state = {**state, "mark": None}
    state = {**state, "generations": generations}
    if run.state != RunState.RUNNING or len(steps) < 2:
        after, findings = _while(state, False, run, run.last_step, "")
        return {**after, "mark": None}, findings
    fastest = max(steps.values())
    mark = state.get("mark") or [run.now, fastest]
    behind = {rank: step for rank, step in steps.items() if step < mark[1]}
    seconds, longest = parameters["seconds"], state.get("longest", 0.0)
    if not behind:
        longest = max(longest, min(run.now - mark[0], MAX_PAUSES / PAUSES * seconds))
        mark = [run.now, fastest]
    late = bool(behind) and run.now - mark[0] >= max(seconds, PAUSES * longest)
    rank = min(behind, key=lambda rank: behind[rank], default=0)
    others = f" {len(behind) - 1} more are behind." if len(behind) > 1 else ""
    message = (
        f"Rank {rank} is at step {behind.get(rank, 0):,}, and others at step {fastest:,}, for "
        f"{run.now - mark[0]:.0f} s.{others}"
    )
    after, findings = _while(state, late, run, behind.get(rank, run.last_step), message)
    return {**after, "mark": mark, "longest": longest}, findings


def _is(run: ConditionFacts, wanted: RunState, state: State) -> bool:
    return run.state == wanted and (bool(state.get("open")) or run.now - run.heartbeat < NEWS)


def _while(
    state: State, holds: bool, run: ConditionFacts, step: int, message: str
) -> tuple[State, list[ConditionChange]]:
    """The findings of a condition that lasts as long as it holds, in one start of the training.

    A start that fails like the one before it, with no look in between, is another occurrence.
    """
    state = {"open": False, "onset": 0, "times": 0, "start": run.start, **state}
    findings = []
    if state["open"] and (not holds or state["start"] != run.start):
        state["open"] = False
        findings.append(ConditionChange(opened=False, onset_step=state["onset"], step=step))
    if holds and not state["open"]:
        state.update(open=True, onset=step, times=state["times"] + 1)
        findings.append(ConditionChange(opened=True, onset_step=step, step=step, message=message))
    return {**state, "start": run.start}, findings
