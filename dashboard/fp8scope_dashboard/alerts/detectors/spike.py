"""Spikes of a loss: far above its recent values for a few points, whether it comes back or not."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import levels
from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, in_words, usable
from fp8scope_dashboard.statistics.robust import MAD_TO_SIGMA

Parameters = Mapping[str, float]

# The median absolute deviation times this estimates the standard deviation of a normal distribution.
MIN_SIGMA = 1e-12
# The share of the height above which a neighbour belongs to a spike of sparse points, and most such points.
SHOULDER = 0.5
MAX_ELEVATED = 8
# Rows of so many hard batches that a run may have had by chance before a further one is a spike.
MAX_CHANCE = 0.01


def spike(
    state: State, steps: NDArray[np.int64], losses: NDArray[np.float64], parameters: Parameters
) -> tuple[State, list[ConditionChange]]:
    """Open when the loss is above its recent median by `z` sigma and by `fraction` for `points` steps.

    Where every step is logged, these are `points` points in a row. Where only every second step or fewer are,
    one point says nothing about the steps beside it, and a single one may be a hard batch: several in a row
    must be above half of that height and one above all of it, and span as many steps. Two are enough unless
    the run has shown so many hard batches that two in a row happen by chance (MAX_CHANCE).

    sigma is the larger of 1.4826 times the median absolute deviation of the last `window` points, and the
    deviation of the loss's level, slow variations included (`levels`): noise that lasts longer than the
    window does not show in it. Suspected points stay out of the window until a point is back in range, so
    that a spike does not raise its own limit.

    Closes when the loss stays below half of the limit for `recover` points, against the window from before
    the spike; or after `window` points, which become the new window: that was a shift of the level, not a
    spike.

    Args:
        steps: int64[n]; those that are not above the last one are ignored.
        losses: float64[n]; those that are not finite are ignored: see `not_finite`.
        parameters: `z`; `fraction` of the median; `points` in steps; `window`, `recover` in points.
    """
    state = {**_fresh(), **copy.deepcopy(state)}
    ordered = sorted(state["window"])
    findings = []
    for step, loss in zip(steps.tolist(), losses.tolist(), strict=True):
        if not usable(loss) or (state["last_step"] is not None and step <= state["last_step"]):
            continue
        state["last_step"] = step
        finding = (_while_open if state["open"] else _watch)(state, ordered, step, loss, parameters)
        if finding:
            findings.append(finding)
    return state, findings


def _fresh() -> State:
    return {
        "last_step": None,
        "window": [],
        "suspects": [],
        # Steps, shares of the height, and losses of the latest points in a row that are above SHOULDER of it.
        "elevated": [],
        # Points that were judged, and those of them above SHOULDER.
        "judged": 0,
        "high": 0,
        "levels": levels.fresh(),
        "slow": 0.0,
        "open": False,
        "since": [],
    }


def _watch(
    state: State, ordered: list[float], step: int, loss: float, parameters: Parameters
) -> ConditionChange | None:
    if len(state["window"]) < parameters["window"]:
        _accept(state, ordered, [loss], parameters)
        return None
    median, sigma = _centre_and_sigma(state, ordered)
    height = max(parameters["z"] * sigma, parameters["fraction"] * abs(median))
    share = (loss - median) / height
    state["judged"] += 1
    if share > SHOULDER:
        state["elevated"] = [*state["elevated"], [step, share, loss]][-MAX_ELEVATED:]
    else:
        state["high"] += len(state["elevated"])
        state["elevated"] = []
    if share > 1.0:
        state["suspects"] = [*state["suspects"], [step, loss]]
    sparse = _is_sparse_spike(state, parameters["points"])
    if share <= 1.0:
        values = [value for _, value in state["suspects"]] + [loss]
        if not sparse:
            _accept(state, ordered, values, parameters)
            state["suspects"] = []
            return None
        onset, since = state["elevated"][0][0], [value for *_, value in state["elevated"]]
    elif sparse or len(state["suspects"]) >= parameters["points"]:
        onset = state["elevated"][0][0] if sparse else state["suspects"][0][0]
        since = [value for _, value in state["suspects"]]
    else:
        return None
    state.update(open=True, onset=onset, calm=0, half=median + height / 2.0, since=since)
    state.update(suspects=[], elevated=[])
    message = (
        f"Loss rose from about {in_words(median)} to {in_words(max(since))} at step {onset:,}, "
        f"{(max(since) - median) / sigma:.0f} times its usual deviation of {in_words(sigma)}."
    )
    evidence = {"median": median, "sigma": sigma}
    return ConditionChange(
        opened=True,
        onset_step=onset,
        step=step,
        value=max(since),
        threshold=median + height,
        message=message,
        evidence=evidence,
    )


def _is_sparse_spike(state: State, points: float) -> bool:
    """Return whether points in a row, of which no two are of neighbouring steps, last for `points` steps."""
    elevated = state["elevated"]
    steps = [int(step) for step, *_ in elevated]
    if len(steps) < 2 or min(b - a for a, b in zip(steps, steps[1:], strict=False)) < 2:
        return False
    # Expected number of such rows so far, if high points are independent of each other.
    chance = state["judged"] * ((state["high"] + 0.5) / state["judged"]) ** len(steps)
    return (
        chance <= MAX_CHANCE
        and steps[-1] - steps[0] >= points - 1
        and max(share for _, share, _ in elevated) > 1.0
    )


def _while_open(
    state: State, ordered: list[float], step: int, loss: float, parameters: Parameters
) -> ConditionChange | None:
    state["since"].append(loss)
    state["calm"] = state["calm"] + 1 if loss < state["half"] else 0
    if state["calm"] >= parameters["recover"]:
        state.update(open=False, since=[])
        return ConditionChange(
            opened=False,
            onset_step=state["onset"],
            step=step,
            value=loss,
            threshold=None,
            message=f"Loss is back at {in_words(loss)}.",
        )
    if len(state["since"]) < parameters["window"]:
        return None
    state.update(open=False, window=[], levels=levels.fresh(), slow=0.0)
    ordered.clear()
    _accept(state, ordered, state.pop("since"), parameters)
    state["since"] = []
    level = in_words(ordered[len(ordered) // 2])
    return ConditionChange(
        opened=False,
        onset_step=state["onset"],
        step=step,
        value=loss,
        threshold=None,
        message=f"Loss has stayed at a level of {level}.",
    )


def _accept(state: State, ordered: list[float], values: list[float], parameters: Parameters) -> None:
    window = state["window"]
    for value in values:
        window.append(value)
        insort(ordered, value)
        if levels.add(state["levels"], value):
            past = levels.past(state["levels"])
            state["slow"] = past.deviation if past else 0.0
    while len(window) > parameters["window"]:
        del ordered[bisect_left(ordered, window.pop(0))]


def _centre_and_sigma(state: State, ordered: list[float]) -> tuple[float, float]:
    middle = len(ordered) // 2
    median = ordered[middle]
    mad = sorted(abs(value - median) for value in ordered)[middle]
    return median, max(MAD_TO_SIGMA * mad, state["slow"], MIN_SIGMA)
