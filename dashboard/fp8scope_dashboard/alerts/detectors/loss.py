"""Detectors that need only the run's own loss.

Each is a pure function `(state, steps, losses, parameters) -> (state, findings)`. Call it with batches of any
size and the state that it returned last (an empty dict at first). The result does not depend on the division
of the points into batches.

Steps may have gaps. `spike` and `divergence` use the first visit of each step and ignore steps that are not
above the last one (duplicate, late or rewound). `not_finite` uses every point.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import Finding, State, finite, in_words, percent, usable

Parameters = Mapping[str, float]
Result = tuple[State, list[Finding]]
LossDetector = Callable[[State, NDArray[np.int64], NDArray[np.float64], Parameters], Result]

# The median absolute deviation times this estimates the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
# Mean absolute difference of two independent normal values over their standard deviation: 2 / sqrt(pi).
DIFFERENCE_TO_SIGMA = 2.0 / math.sqrt(math.pi)
# The smallest sigma, relative to the loss: a loss that is logged with few digits has a MAD of 0.
SPIKE_FLOOR = 1e-3


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
                findings.append(Finding(False, state["onset"], step, loss))
            continue
        state["calm"] = 0
        if not state["open"]:
            state.update(open=True, onset=step)
            findings.append(_went_wrong(step, loss, state["last"]))
    return state, findings


def _went_wrong(step: int, loss: float, before: float | None) -> Finding:
    if before is None:
        message = f"Loss is {in_words(loss)} at step {step}, its first logged value."
    else:
        message = f"Loss rose from {in_words(before)} to {in_words(loss)} at step {step}."
        if loss == -math.inf:
            message = f"Loss fell from {in_words(before)} to {in_words(loss)} at step {step}."
    return Finding(True, step, step, finite(loss), None, message, {"before": before, "loss": in_words(loss)})


def spike(
    state: State, steps: NDArray[np.int64], losses: NDArray[np.float64], parameters: Parameters
) -> Result:
    """Open when the robust z of the loss exceeds `z` on `points` consecutive points.

    z is the distance above the median of the last `window` points over 1.4826 times their median absolute
    deviation. Suspected points stay out of the window until a point is back in range, so that a spike does
    not raise its own limit. Closes when z stays below half of the limit for `recover` points, against the
    window from before the spike. Ignores values that are not finite: see `not_finite`.

    Args:
        parameters: `z`; `points`, `window`, `recover` in points.
    """
    monitor = _Spike(parameters, {"last_step": None, "window": [], "suspects": [], "open": False, **state})
    findings = [monitor.add(step, loss) for step, loss in zip(steps.tolist(), losses.tolist(), strict=True)]
    return monitor.state, [finding for finding in findings if finding]


@dataclass
class _Spike:
    parameters: Parameters
    state: State

    def __post_init__(self) -> None:
        self.state = {**self.state, "window": list(self.state["window"])}
        self._ordered = sorted(self.state["window"])

    def add(self, step: int, loss: float) -> Finding | None:
        state = self.state
        if not usable(loss) or (state["last_step"] is not None and step <= state["last_step"]):
            return None
        state["last_step"] = step
        if state["open"]:
            return self._while_open(step, loss)
        if len(state["window"]) < self.parameters["window"]:
            self._accept([loss])
            return None
        median, sigma = self._centre_and_sigma()
        if (loss - median) / sigma <= self.parameters["z"]:
            self._accept([value for _, value in state["suspects"]] + [loss])
            state["suspects"] = []
            return None
        state["suspects"] = [*state["suspects"], [step, loss]]
        if len(state["suspects"]) < self.parameters["points"]:
            return None
        return self._open(step, median, sigma)

    def _open(self, step: int, median: float, sigma: float) -> Finding:
        onset = self.state["suspects"][0][0]
        peak = max(value for _, value in self.state["suspects"])
        self.state.update(open=True, onset=onset, median=median, sigma=sigma, calm=0, suspects=[])
        limit = median + self.parameters["z"] * sigma
        message = (
            f"Loss rose from about {in_words(median)} to {in_words(peak)} at step {onset}, "
            f"{(peak - median) / sigma:.0f} times its usual deviation of {in_words(sigma)}."
        )
        return Finding(True, onset, step, peak, limit, message, {"median": median, "sigma": sigma})

    def _while_open(self, step: int, loss: float) -> Finding | None:
        state = self.state
        calm = (loss - state["median"]) / state["sigma"] < self.parameters["z"] / 2.0
        state["calm"] = state["calm"] + 1 if calm else 0
        if state["calm"] < self.parameters["recover"]:
            return None
        state["open"] = False
        return Finding(False, state["onset"], step, loss)

    def _accept(self, values: list[float]) -> None:
        window = self.state["window"]
        for value in values:
            window.append(value)
            insort(self._ordered, value)
        while len(window) > self.parameters["window"]:
            del self._ordered[bisect_left(self._ordered, window.pop(0))]

    def _centre_and_sigma(self) -> tuple[float, float]:
        middle = len(self._ordered) // 2
        median = self._ordered[middle]
        deviation = sorted(abs(value - median) for value in self._ordered)[middle]
        return median, max(MAD_TO_SIGMA * deviation, SPIKE_FLOOR * abs(median), 1e-12)


def divergence(
    state: State, steps: NDArray[np.int64], losses: NDArray[np.float64], parameters: Parameters
) -> Result:
    """Open when the smoothed loss is above its minimum by max(`fraction`, `sigmas` sigma) for `points`.

    The loss is smoothed exponentially over `span` points (weight a = 2 / (span + 1)). sigma is the noise of
    the smoothed loss: sqrt(a / (2 - a)) times the noise of a point, which is estimated from the mean absolute
    difference of successive points. Minimum and sigma are taken at the minimum, so that a run with growing
    noise does not raise its own limit. Closes when the smoothed loss is below half of that rise for `points`.

    Args:
        parameters: `fraction` of the minimum; `sigmas`; `points`, `span` in points.
    """
    state = {"last_step": None, "count": 0, "open": False, "above": 0, "calm": 0, **state}
    findings = []
    for step, loss in zip(steps.tolist(), losses.tolist(), strict=True):
        if not usable(loss) or (state["last_step"] is not None and step <= state["last_step"]):
            continue
        state["last_step"] = step
        _smooth(state, step, loss, parameters["span"])
        # The minimum is meaningless while the average still depends on its first value.
        if state["count"] > parameters["span"]:
            finding = _divergence_at(state, step, parameters)
            if finding:
                findings.append(finding)
    return state, findings


def _smooth(state: State, step: int, loss: float, span: float) -> None:
    weight = 2.0 / (span + 1.0)
    state["count"] += 1
    if state["count"] == 1:
        state.update(ema=loss, noise=0.0, previous=loss)
        return
    # Averages over min(count, span) points, so that the first value does not dominate.
    gain = max(weight, 1.0 / state["count"])
    state["ema"] += gain * (loss - state["ema"])
    state["noise"] += max(weight, 1.0 / (state["count"] - 1)) * (
        abs(loss - state["previous"]) - state["noise"]
    )
    state["previous"] = loss
    if state["count"] >= span and state["ema"] <= state.get("minimum", math.inf):
        shrink = math.sqrt(weight / (2.0 - weight)) / DIFFERENCE_TO_SIGMA
        state.update(minimum=state["ema"], minimum_step=step, sigma=shrink * state["noise"])


def _divergence_at(state: State, step: int, parameters: Parameters) -> Finding | None:
    minimum, ema = state["minimum"], state["ema"]
    rise = max(parameters["fraction"] * abs(minimum), parameters["sigmas"] * state["sigma"])
    if state["open"]:
        state["calm"] = state["calm"] + 1 if ema < minimum + rise / 2.0 else 0
        if state["calm"] < parameters["points"]:
            return None
        state.update(open=False, above=0, calm=0)
        return Finding(False, state["onset"], step, ema)
    if ema <= minimum + rise:
        state["above"] = 0
        return None
    state["above"] += 1
    if state["above"] == 1:
        state["onset"] = step
    if state["above"] < parameters["points"]:
        return None
    state.update(open=True, calm=0)
    above = f", {percent(ema / minimum - 1.0)} higher" if minimum > 0 else ""
    message = (
        f"Smoothed loss rose from its minimum of {in_words(minimum)} at step {state['minimum_step']} to "
        f"{in_words(ema)} at step {step}{above}; it has been above the limit of {in_words(minimum + rise)} "
        f"since step {state['onset']}."
    )
    evidence = {"minimum": minimum, "minimum_step": state["minimum_step"], "sigma": state["sigma"]}
    return Finding(True, state["onset"], step, ema, minimum + rise, message, evidence)
