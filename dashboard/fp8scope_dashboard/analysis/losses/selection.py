"""The runs that a comparison uses, and the reasons to leave out the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8scope_dashboard.analysis.losses.alignment import Axis, LossCurve, choose_axis
from fp8scope_dashboard.analysis.losses.schedules import Schedules, compare_schedules, has_ended
from fp8scope_dashboard.text import verdicts

# A baseline takes part if at least this share of its last losses is finite.
FINITE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The runs of a comparison.

    Attributes:
        axis: the axis on which they are compared.
        runs: indices of the arm's runs that take part, the judged run first.
        baselines: indices of the baselines that take part.
        diverged: indices of the arm's runs whose loss is not finite at their end.
        finals: the schedules have other lengths and have ended: compare the final losses; `ratio` of lengths.
        uncertain: the schedules have, or may have, other lengths and have not ended: there is no verdict.
        ended: the judged run has reached the end of its schedule.
        warnings: sentences about what was left out, and about schedules.
    """

    axis: Axis
    runs: tuple[int, ...]
    baselines: tuple[int, ...]
    diverged: tuple[int, ...] = ()
    finals: bool = False
    ratio: float = 1.0
    uncertain: bool = False
    ended: bool = False
    warnings: list[str] = field(default_factory=list)


def select(runs: Sequence[LossCurve], baselines: Sequence[LossCurve], least: int, reach: float) -> Selection:
    """Choose the runs of a comparison; all curves must come from `alignment.clean`.

    A run takes part if it covers at least `reach` of the range of both the judged run and the furthest
    baseline: otherwise one that has just started, or died early, would move the window of all runs back to
    its own end. A run with fewer than `least` points never decides.
    """
    axis = choose_axis([curve for curve in (*runs, *baselines) if len(curve)])
    logged = [i for i, curve in enumerate(baselines) if len(curve)]
    schedules = compare_schedules(runs[0], [baselines[i] for i in logged], axis)
    candidates, finals, warnings = _of_schedule(runs[0], baselines, logged, schedules)
    # A NaN at the end is no end by chance, so it does not count as short.
    furthest = max((_end(baselines[i], axis) for i in candidates), default=0.0)
    horizon = reach * min(_end(runs[0], axis), furthest)
    used, short, broken = [], [], []
    for i in candidates:
        if not _is_finite(baselines[i]):
            broken.append(i)
        elif _end(baselines[i], axis) < horizon and not finals:
            short.append(i)
        else:
            used.append(i)
    chosen, diverged, absent = _siblings(runs, axis, horizon, least)
    warnings += verdicts.left_out(
        short=[baselines[i].label(i) for i in short],
        broken=[baselines[i].label(i) for i in broken],
        siblings=[runs[i].label(i) for i in absent],
        left=len(used),
        of=len(logged),
    )
    return Selection(
        axis=axis,
        runs=tuple(chosen),
        baselines=tuple(used),
        diverged=tuple(diverged),
        finals=finals,
        ratio=schedules.ratio,
        uncertain=schedules.unknown or (bool(schedules.other) and not schedules.same and not finals),
        ended=has_ended(runs[0]),
        warnings=warnings,
    )


def _of_schedule(
    run: LossCurve, baselines: Sequence[LossCurve], logged: Sequence[int], schedules: Schedules
) -> tuple[list[int], bool, list[str]]:
    """The baselines whose schedule allows a comparison, whether to compare finals, and warnings."""
    if schedules.unknown:
        return list(logged), False, [verdicts.SCHEDULE_UNKNOWN]
    if not schedules.other:
        return list(logged), False, []
    if schedules.same:
        names = [baselines[logged[i]].label(logged[i]) for i in schedules.other]
        return [logged[i] for i in schedules.same], False, [verdicts.other_schedules(names)]
    ended = [i for i in logged if has_ended(baselines[i])]
    finals = has_ended(run) and bool(ended)
    warning = verdicts.schedules_differ(schedules.ratio, finals=finals)
    return (ended if finals else list(logged)), finals, [warning]


def _siblings(
    runs: Sequence[LossCurve], axis: Axis, horizon: float, least: int
) -> tuple[list[int], list[int], list[int]]:
    """Indices of the arm's runs that take part, of those that diverged, and of those that are left out."""
    chosen, diverged, absent = [0], [], []
    if len(runs[0]) >= least and not np.isfinite(runs[0].losses[-1]):
        diverged.append(0)
    for index, curve in enumerate(runs[1:], 1):
        finite = len(curve) > 0 and bool(np.isfinite(curve.losses[-1]))
        if len(curve) >= least and not finite:
            diverged.append(index)
        elif not finite or _end(curve, axis) < horizon or compare_schedules(runs[0], [curve], axis).other:
            absent.append(index)
        else:
            chosen.append(index)
    return chosen, diverged, absent


def _is_finite(curve: LossCurve) -> bool:
    """Return whether the losses at the end of a baseline can be used."""
    last = np.isfinite(curve.losses[-max(5, len(curve) // 10) :])
    return bool(last[-1]) and float(last.mean()) >= FINITE_SHARE


def _end(curve: LossCurve, axis: Axis) -> float:
    return float(curve.on(axis)[-1]) if len(curve) else 0.0
