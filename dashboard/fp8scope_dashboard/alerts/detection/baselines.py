"""Read the losses of a run and its baseline for the detector `above_baseline`, each point once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import ConditionChange, State, above_baseline, restarted
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.losses.onsets.process import FIRST_POINTS
from fp8scope_dashboard.analysis.losses.onsets.short_runs import LIMIT
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

# Schedules whose lengths differ by more are compared only for gross rises: at the same step their learning
# rates differ, and so do the losses, in any precision.
SAME_SCHEDULE = 0.02
GROSS_MARGIN = 0.1
# Common points from which on it is decided how runs are aligned, and the share of them that must be at the
# same steps; else the baselines are interpolated.
ALIGNED_POINTS, SHARED_STEPS = 20, 0.5
# A baseline is interpolated over gaps of at most this share of the axis.
MAX_GAP = 0.1


@dataclass(frozen=True)
class Stretch:
    """New points of a loss: x float64[N] ascending (tokens or steps), steps int64[N], losses float64[N]."""

    x: Floats
    steps: NDArray[np.int64]
    losses: Floats


@dataclass(frozen=True)
class BaselineProgress:
    """The new state, the findings, and whether the run waits for a baseline that still runs."""

    state: State
    findings: list[ConditionChange]
    waiting: bool = False


def follow(run: Run, state: State, parameters: Mapping[str, float]) -> BaselineProgress:
    """Run the detector over the new losses of a run and its baselines, as far as both go.

    Aligned on tokens if all runs log them, else on steps. If the runs log at different steps, the baselines
    are interpolated. Both are decided once per run. A baseline run that is still running limits the range;
    one that is over counts as far as it went. Baseline runs that are added later count from there on: no
    point is judged twice. `note` in the state says, for people, what prevents the comparison; it is empty if
    nothing does.
    """
    seeds = comparison_runs.baseline_runs(run)
    if not seeds or run.last_step is None:
        return BaselineProgress(state, [])
    axis = state.get("axis") or _axis([run, *seeds])
    seeds, note = _of_one_schedule(run, seeds, axis)
    if note:
        parameters = {**parameters, "margin": max(parameters["margin"], GROSS_MARGIN)}
    cursors: dict[str, int] = state.get("cursors", {})
    mine = _stretch(run.id, axis, _next(cursors, run))
    if not len(mine.x):
        return BaselineProgress(state, [])
    # The last point is read again: the next ones are interpolated from it.
    theirs = [_stretch(seed.id, axis, cursors.get(str(seed.id))) for seed in seeds]
    ends = [stretch.x[-1] if len(stretch.x) else -np.inf for stretch in theirs]
    waited_for = [end for seed, end in zip(seeds, ends, strict=True) if seed.state == RunState.RUNNING]
    end = min([max(ends), *waited_for])
    waiting = min(waited_for, default=np.inf) < mine.x[-1]
    count = int(np.searchsorted(mine.x, end, side="right"))
    interpolates = state.get("interpolates")
    if interpolates is None:
        if count < ALIGNED_POINTS and RunState.RUNNING in {run.state, *(seed.state for seed in seeds)}:
            return BaselineProgress(state, [], waiting)
        interpolates = not any(_share_steps(stretch.x, mine.x) for stretch in theirs)
    if not count:
        return BaselineProgress({**state, "note": _nothing_common(run) if not waiting else note}, [], waiting)
    x = mine.x[:count]
    losses = np.stack([_at(stretch, x, interpolates=interpolates) for stretch in theirs])
    before = {key: value for key, value in state.items() if key not in ("axis", "cursors")}
    after, findings = above_baseline(before, mine.steps[:count], mine.losses[:count], losses, parameters)
    compared = state.get("compared", 0) + int(np.isfinite(losses).any(axis=0).sum())
    after |= {"axis": axis, "interpolates": interpolates, "compared": compared}
    after["note"] = note if compared else _nothing_common(run)
    read = {run.id: mine, **{seed.id: losses for seed, losses in zip(seeds, theirs, strict=True)}}
    after["cursors"] = _advanced(cursors, read, float(x[-1]))
    return BaselineProgress(after, findings, waiting)


def _of_one_schedule(run: Run, seeds: list[Run], axis: str) -> tuple[list[Run], str]:
    """The baseline runs whose schedule is as long as the run's, or unknown; if none, all, with a note."""
    mine = _schedule(run, axis)
    lengths = [_schedule(seed, axis) for seed in seeds]
    if mine is None:
        return seeds, ""
    same = [
        seed
        for seed, length in zip(seeds, lengths, strict=True)
        if length is None or abs(length / mine - 1.0) <= SAME_SCHEDULE
    ]
    if same:
        return same, ""
    longest = max(length for length in lengths if length is not None)
    return seeds, (
        f"The schedules differ: {mine:,.0f} {axis} in this run, {longest:,.0f} in its baseline. Their losses "
        f"differ in any precision, so only rises of more than {2 * GROSS_MARGIN:.0%} are reported."
    )


def _schedule(run: Run, axis: str) -> float | None:
    """The length of a schedule on an axis; None if unknown. A finished run had the length it reached."""
    steps = run.total_steps or (run.last_step if run.state == RunState.FINISHED else None)
    if not steps or axis == "steps":
        return float(steps) if steps else None
    tokens = run.last_scalars.get("tokens")
    return float(steps * tokens / run.last_step) if tokens and run.last_step else None


def _nothing_common(run: Run) -> str:
    return (
        f"Cannot compare: {run.name} and its baseline have no losses at common or close steps. "
        "Log the loss at the same steps in both."
    )


def few_points(compared: int) -> str:
    """That a run has too few common points to be judged; empty if it has enough, or none."""
    if not 0 < compared < FIRST_POINTS:
        return ""
    return (
        f"Too short to compare: points of loss in common with the baseline: {compared}. Below {FIRST_POINTS} "
        f"points only rises of more than {LIMIT:.0%} are reported. Log the loss at more steps."
    )


def _next(cursors: Mapping[str, int], run: Run) -> int | None:
    cursor = cursors.get(str(run.id))
    return None if cursor is None else cursor + 1


def has_passed(run: Run, state: State, step: int) -> bool:
    """Return whether the losses of a run have been read up to a step or further."""
    cursor = state.get("cursors", {}).get(str(run.id))
    return cursor is not None and cursor >= step


def rewound(run: Run, state: State, step: int) -> State:
    """The state from which the losses of a run are read again from a step on."""
    inner = {key: value for key, value in state.items() if key not in ("axis", "cursors")}
    # The baselines are read from their beginning again: on the tokens' axis, the step says nothing of theirs.
    cursors = {str(run.id): step - 1}
    return {**restarted(inner, step), "axis": state["axis"], "cursors": cursors}


def _axis(runs: list[Run]) -> str:
    return "tokens" if all("tokens" in run.last_scalars for run in runs) else "steps"


def _stretch(run_id: UUID, axis: str, first: int | None) -> Stretch:
    loss = queries.scalar(run_id, "loss", first=first)
    if axis == "steps":
        return Stretch(loss.steps.astype(np.float64), loss.steps, loss.values)
    tokens = queries.scalar(run_id, "tokens", first=first)
    steps, ours, theirs = np.intersect1d(loss.steps, tokens.steps, assume_unique=True, return_indices=True)
    x = tokens.values[theirs]
    # Only counts that are finite and grow can be an axis.
    growing = np.isfinite(x) & (x > np.concatenate([[-np.inf], np.fmax.accumulate(x)[:-1]]))
    return Stretch(x[growing], steps[growing], loss.values[ours][growing])


def _share_steps(theirs: Floats, mine: Floats) -> bool:
    """Return whether two axes, over the range that they have in common, are mostly at the same places."""
    if not len(theirs) or not len(mine):
        return False
    low, high = max(theirs[0], mine[0]), min(theirs[-1], mine[-1])
    inside = [axis[(axis >= low) & (axis <= high)] for axis in (theirs, mine)]
    fewest = min(map(len, inside))
    return bool(fewest) and len(np.intersect1d(*inside)) >= SHARED_STEPS * fewest


def _at(stretch: Stretch, x: Floats, *, interpolates: bool) -> Floats:
    """The losses at these x, NaN where there is none.

    With `interpolates` the finite losses on both sides count, if they are close enough to each other.
    """
    finite = np.isfinite(stretch.losses) if interpolates else np.ones(len(stretch.x), dtype=bool)
    finite_stretch, losses = stretch.x[finite], stretch.losses[finite]
    result = np.full(len(x), np.nan)
    after = np.searchsorted(finite_stretch, x)
    inside = after < len(finite_stretch)
    same = np.zeros(len(x), dtype=bool)
    same[inside] = finite_stretch[after[inside]] == x[inside]
    result[same] = losses[after[same]]
    if interpolates:
        between = np.flatnonzero(inside & ~same & (after > 0))
        left, right = after[between] - 1, after[between]
        close = finite_stretch[right] - finite_stretch[left] <= MAX_GAP * x[between]
        left, right, places = left[close], right[close], between[close]
        share = (x[places] - finite_stretch[left]) / (finite_stretch[right] - finite_stretch[left])
        result[places] = losses[left] + share * (losses[right] - losses[left])
    return result


def _advanced(cursors: dict[str, int], read: Mapping[UUID, Stretch], x: float) -> dict[str, int]:
    after = dict(cursors)
    for run_id, stretch in read.items():
        count = int(np.searchsorted(stretch.x, x, side="right"))
        if count:
            after[str(run_id)] = int(stretch.steps[count - 1])
    return after
