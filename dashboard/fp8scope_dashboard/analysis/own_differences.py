"""The difference of each run of a group to the baseline, beside the verdict on the group.

A verdict is about the mean of a group of runs that differ in their seed. One run of it may be far from the
others; its own difference shows that, and it is named wherever the verdict of its group stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC_NATS, Prior, odd_seeds
from fp8scope_dashboard.text import own_differences as text
from fp8scope_dashboard.text.numbers import usable


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """One run's difference to the baseline.

    Attributes:
        run: its id.
        value: its mean loss in the window, or its score.
        difference: to the baseline, in the unit of the comparison; None if its loss is not finite.
        left: it is far from the other runs of its group, as of a run that broke down.
        from_group: its distance from the mean of the others; 0 unless it left.
    """

    run: str
    name: str
    seed: int | None = None
    value: float | None = None
    difference: float | None = None
    left: bool = False
    from_group: float = 0.0


def of_losses(
    runs: Sequence[RunDifference], curves: Sequence[LossCurve], result: LossComparison, prior: Prior
) -> list[RunDifference]:
    """The differences of the runs that took part in a comparison of losses; their mean is the group's.

    Args:
        runs: names of the runs, the judged one first; `curves` are their losses.
        prior: of the spread between seeds.

    Returns:
        The given runs that took part, and those whose loss is not finite at its end; empty without a window.
    """
    broken = [replace(run, left=True) for run, curve in zip(runs, curves, strict=True) if ends_broken(curve)]
    if result.basis is None or result.window is None or result.delta is None:
        return broken if len(runs) > 1 else []
    levels = [
        (runs[index], _level(curves[index], result.aligned_on, result.window))
        for index in result.basis.runs
        if index < len(runs)
    ]
    measured = [(run, level) for run, level in levels if level is not None]
    if not measured:
        return broken
    scale = abs(result.baseline_loss or 0.0) if result.unit == "relative" else 1.0
    values = np.array([level for _, level in measured])
    differences = result.delta + (values - values.mean()) / (scale or 1.0)
    own_differences = with_left(
        [
            replace(run, value=float(value), difference=float(difference))
            for (run, _), value, difference in zip(measured, values, differences, strict=True)
        ],
        PUBLIC_NATS if result.unit == "nats" else prior,
    )
    return [*own_differences, *(run for run in broken if run.run not in {own.run for own in own_differences})]


def ends_broken(curve: LossCurve) -> bool:
    """Return whether the last loss is not finite."""
    return bool(len(curve)) and not usable(curve.losses[-1:]).all()


def with_left(runs: Sequence[RunDifference], prior: Prior) -> list[RunDifference]:
    """The runs, of which those that are far from the others are marked. Fewer than three never are."""
    values = np.array([run.difference for run in runs], dtype=np.float64)
    left = odd_seeds(values, prior)
    others = float(np.delete(values, left).mean()) if len(left) < len(values) else 0.0
    return [
        replace(run, left=True, from_group=float(values[index]) - others) if index in left else run
        for index, run in enumerate(runs)
    ]


def _level(curve: LossCurve, axis: Any, window: tuple[float, float]) -> float | None:
    """The mean of the usable losses in the window; None without one."""
    x = curve.on(axis)
    losses = curve.losses[(x >= window[0]) & (x <= window[1])]
    losses = losses[usable(losses)]
    return float(losses.mean()) if len(losses) else None


def as_dict(group: str, runs: Sequence[RunDifference], own: str, unit: str) -> dict[str, Any]:
    """Return what is stored beside a verdict: `own`, the judged run's difference, and `group`, that of its
    runs.

    Args:
        group: the name of the seed group; empty without one.
        own: id of the judged run.
        unit: of the differences: relative, nats, share (of items) or score.
    """
    mine = next((run for run in runs if run.run == own), None)
    difference = mine.difference if mine is not None else None
    return {
        "own": {
            "difference": difference if difference is not None and math.isfinite(difference) else None,
            "value": mine.value if mine is not None else None,
            "left": mine.left if mine is not None else False,
            "unit": unit,
        },
        "group": {"name": group, "runs": [asdict(run) for run in runs]},
    }


def sentences(runs: Sequence[RunDifference], unit: str) -> list[str]:
    """Sentences that name the runs that left their group."""
    left = [run for run in runs if run.left]
    return [text.left(run.name, run.difference, run.from_group, unit) for run in left]
