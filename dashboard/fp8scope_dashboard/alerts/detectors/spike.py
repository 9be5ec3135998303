"""Spikes of a loss: far above its recent values for a few points, whether it comes back or not."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import levels
from fp8scope_dashboard.alerts.detectors.base import Finding, State, in_words, usable

Parameters = Mapping[str, float]

# The median absolute deviation times this estimates the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
SMALLEST_SIGMA = 1e-12


def spike(
    state: State, steps: NDArray[np.int64], losses: NDArray[np.float64], parameters: Parameters
) -> tuple[State, list[Finding]]:
    """Open when the loss is above its recent median by `z` sigma and by `fraction` on `points` points in a
    row.

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
        parameters: `z`; `fraction` of the median; `points`, `window`, `recover` in points.
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
        "levels": levels.fresh(),
        "slow": 0.0,
        "open": False,
        "since": [],
    }


def _watch(
    state: State, ordered: list[float], step: int, loss: float, parameters: Parameters
) -> Finding | None:
    if len(state["window"]) < parameters["window"]:
        _accept(state, ordered, [loss], parameters)
        return None
    median, sigma = _centre_and_sigma(state, ordered)
    height = max(parameters["z"] * sigma, parameters["fraction"] * abs(median))
    if loss - median <= height:
        _accept(state, ordered, [value for _, value in state["suspects"]] + [loss], parameters)
        state["suspects"] = []
        return None
    state["suspects"] = [*state["suspects"], [step, loss]]
    if len(state["suspects"]) < parameters["points"]:
        return None
    onset, since = state["suspects"][0][0], [value for _, value in state["suspects"]]
    state.update(open=True, onset=onset, calm=0, half=median + height / 2.0, since=since, suspects=[])
    message = (
        f"Loss rose from about {in_words(median)} to {in_words(max(since))} at step {onset:,}, "
        f"{(max(since) - median) / sigma:.0f} times its usual deviation of {in_words(sigma)}."
    )
    evidence = {"median": median, "sigma": sigma}
    return Finding(True, onset, step, max(since), median + height, message, evidence)


def _while_open(
    state: State, ordered: list[float], step: int, loss: float, parameters: Parameters
) -> Finding | None:
    state["since"].append(loss)
    state["calm"] = state["calm"] + 1 if loss < state["half"] else 0
    if state["calm"] >= parameters["recover"]:
        state.update(open=False, since=[])
        return Finding(False, state["onset"], step, loss, None, f"Loss is back at {in_words(loss)}.")
    if len(state["since"]) < parameters["window"]:
        return None
    state.update(open=False, window=[], levels=levels.fresh(), slow=0.0)
    ordered.clear()
    _accept(state, ordered, state.pop("since"), parameters)
    state["since"] = []
    level = in_words(ordered[len(ordered) // 2])
    return Finding(False, state["onset"], step, loss, None, f"Loss has stayed at a level of {level}.")


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
    return median, max(MAD_TO_SIGMA * mad, state["slow"], SMALLEST_SIGMA)
