"""Losses that are not finite, and the form of all detectors that need only the run's own loss.

Each of them (`not_finite`, `spike`, `divergence`) is a pure function `(state, steps, losses, parameters) ->
(state, findings)`. Call it with batches of any size and the state that it returned last (an empty dict at
first). The result does not depend on the division of the points into batches.

Steps may have gaps. `spike` and `divergence` use the first visit of each step and ignore steps that are not
above the last one (duplicate, late or rewound). `not_finite` uses every point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, finite, in_words, usable

Parameters = Mapping[str, float]
Result = tuple[State, list[ConditionChange]]
LossDetector = Callable[[State, NDArray[np.int64], NDArray[np.float64], Parameters], Result]


def not_finite(
    state: State, steps: NDArray[np.int64], losses: NDArray[np.float64], parameters: Parameters
) -> Result:
    """Open at the first loss that is NaN or infinite; close after `recover` finite losses in a row.

    Args:
        steps: int64[n].
        losses: float64[n].
        parameters: `recover`, points.
    """
    state = {"open": False, "onset": 0, "calm": 0, "last": None, **state}
    findings = []
    for step, loss in zip(steps.tolist(), losses.tolist(), strict=True):
        if usable(loss):
            state["last"] = loss
            state["calm"] += 1
            if state["open"] and state["calm"] >= parameters["recover"]:
                state["open"] = False
                findings.append(
                    ConditionChange(opened=False, onset_step=state["onset"], step=step, value=loss)
                )
            continue
        state["calm"] = 0
        if not state["open"]:
            state.update(open=True, onset=step)
            findings.append(_went_wrong(step, loss, state["last"]))
    return state, findings


def _went_wrong(step: int, loss: float, before: float | None) -> ConditionChange:
    if before is None:
        message = f"Loss is {in_words(loss)} at step {step:,}, its first logged value."
    else:
        message = f"Loss became {in_words(loss)} at step {step:,}; before, it was {in_words(before)}."
    return ConditionChange(
        opened=True,
        onset_step=step,
        step=step,
        value=finite(loss),
        threshold=None,
        message=message,
        evidence={"before": before, "loss": in_words(loss)},
    )
