"""The alert on a loss above its baseline: the test of `analysis.losses.onsets` as findings.

A verdict *worse* of a run that became worse is the same test, so that both have one onset and one limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, finite, in_words, percent
from fp8scope_dashboard.analysis.losses.onsets.process import Change, advance, restarted
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import count

__all__ = ["above_baseline", "restarted"]


def above_baseline(
    state: State,
    steps: NDArray[np.int64],
    losses: Floats,
    baselines: Floats,
    parameters: Mapping[str, float],
) -> tuple[State, list[ConditionChange]]:
    """Open when a run is above its baseline, by `analysis.losses.onsets.process.advance`; see there."""
    after, changes = advance(state, steps, losses, baselines, parameters)
    return after, [_finding(change, after["seeds"]) for change in changes]


def _finding(change: Change, seeds: int) -> ConditionChange:
    if not change.opened:
        return ConditionChange(opened=False, onset_step=change.onset, step=change.step)
    since = f"Loss is above its baseline since about step {change.onset:,}"
    baseline = in_words(change.baseline)
    if change.limit is None:
        message = f"{since}: it is not finite at step {change.step:,}, where the baseline's is {baseline}."
    else:
        message = (
            f"{since}: on average {percent(change.mean)} up to step {change.step:,}, where the baseline's is "
            f"{baseline}. It was decided by the mean of the last {count(change.window, 'point')}: at least "
            f"{percent(change.window_mean)}, above the limit of {percent(change.limit)}."
        )
    evidence = {
        "e_value": change.e_value,
        "blocks": change.blocks,
        "block_points": change.block_points,
        "window_points": change.window,
        "window_mean": finite(change.window_mean),
        "baseline": change.baseline,
        "seeds": seeds,
    }
    # The mean since the onset is what people read. It is never below what decided.
    shown = math.inf if change.limit is None else max(change.mean, change.window_mean)
    return ConditionChange(
        opened=True,
        onset_step=change.onset,
        step=change.step,
        value=finite(shown),
        threshold=change.limit,
        message=message,
        evidence=evidence,
    )
