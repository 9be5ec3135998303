"""Read the losses of a run and its baseline for the detector `above_baseline`, each point once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import Finding, State, above_baseline, restarted
from fp8scope_dashboard.analysis import lineage
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Stretch:
    """New points of a loss: x float64[N] ascending (tokens or steps), steps int64[N], losses float64[N]."""

    x: Floats
    steps: NDArray[np.int64]
    losses: Floats


@dataclass(frozen=True)
class Followed:
    """The new state, the findings, and whether the run waits for a baseline that still runs."""

    state: State
    findings: list[Finding]
    waiting: bool = False


def follow(run: Run, state: State, parameters: Mapping[str, float]) -> Followed:
    """Run the detector over the new losses of a run and its baselines, as far as both go.

    Aligned on tokens if all runs log them, else on steps; this is decided once per run. Points that no
    baseline run has logged are ignored. A baseline run that is still running limits the range; one that is
    over counts as far as it went. Baseline runs that are added later count from there on: no point is judged
    twice.
    """
    seeds = lineage.baseline_runs(run)
    if not seeds or run.last_step is None:
        return Followed(state, [])
    axis = state.get("axis") or _axis([run, *seeds])
    cursors: dict[str, int] = state.get("cursors", {})
    mine = _stretch(run.id, axis, cursors.get(str(run.id)))
    if not len(mine.x):
        return Followed(state, [])
    theirs = {seed.id: _stretch(seed.id, axis, cursors.get(str(seed.id))) for seed in seeds}
    ends = {seed.id: theirs[seed.id].x[-1] for seed in seeds if len(theirs[seed.id].x)}
    waited_for = [ends.get(seed.id, -np.inf) for seed in seeds if seed.state == RunState.RUNNING]
    end = min([max(ends.values(), default=-np.inf), *waited_for])
    waiting = min(waited_for, default=np.inf) < mine.x[-1]
    count = int(np.searchsorted(mine.x, end, side="right"))
    if not count:
        return Followed(state, [], waiting)
    x = mine.x[:count]
    losses = np.stack([_at(theirs[seed.id], x) for seed in seeds])
    before = {key: value for key, value in state.items() if key not in ("axis", "cursors")}
    after, findings = above_baseline(before, mine.steps[:count], mine.losses[:count], losses, parameters)
    read = {run.id: mine, **theirs}
    after |= {"axis": axis, "cursors": _advanced(cursors, read, float(x[-1]))}
    return Followed(after, findings, waiting)


def has_passed(run: Run, state: State, step: int) -> bool:
    """Whether the losses of a run have been read up to a step or further."""
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


def _stretch(run_id: UUID, axis: str, after: int | None) -> Stretch:
    first = None if after is None else after + 1
    loss = queries.scalar(run_id, "loss", first=first)
    if axis == "steps":
        return Stretch(loss.steps.astype(np.float64), loss.steps, loss.values)
    tokens = queries.scalar(run_id, "tokens", first=first)
    steps, ours, theirs = np.intersect1d(loss.steps, tokens.steps, assume_unique=True, return_indices=True)
    x = tokens.values[theirs]
    # Only counts that are finite and grow can be an axis.
    growing = np.isfinite(x) & (x > np.concatenate([[-np.inf], np.fmax.accumulate(x)[:-1]]))
    return Stretch(x[growing], steps[growing], loss.values[ours][growing])


def _at(stretch: Stretch, x: Floats) -> Floats:
    """The losses at exactly these x, NaN where there is none."""
    losses = np.full(len(x), np.nan)
    indices = np.searchsorted(stretch.x, x)
    inside = indices < len(stretch.x)
    same = np.zeros(len(x), dtype=bool)
    same[inside] = stretch.x[indices[inside]] == x[inside]
    losses[same] = stretch.losses[indices[same]]
    return losses


def _advanced(cursors: dict[str, int], read: Mapping[UUID, Stretch], x: float) -> dict[str, int]:
    after = dict(cursors)
    for run_id, stretch in read.items():
        count = int(np.searchsorted(stretch.x, x, side="right"))
        if count:
            after[str(run_id)] = int(stretch.steps[count - 1])
    return after
