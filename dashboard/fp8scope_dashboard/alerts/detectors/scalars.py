"""Scalars of a run against their own past: gradient norm, speed, the wait for data, memory.

Each detector is a pure function `(state, rows, parameters) -> (state, findings)` and independent of the
division of the points into batches. Steps that are not above the last one are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, in_words, percent
from fp8scope_dashboard.statistics.arrays import Floats

Int64s = NDArray[np.int64]
Parameters = Mapping[str, float]
Result = tuple[State, list[ConditionChange]]

TIMES = ("time_data", "time_forward", "time_backward", "time_optimizer", "time_other")
# A rise of memory between two blocks that is more than rounding, relative to the memory.
MIN_RISE = 1e-4
# In mean absolute deviations: normal noise is hardly clipped.
CLIP = 3.0
# Windows over which the lowest level is forgotten.
FORGET = 5.0


@dataclass(frozen=True)
class ScalarRows:
    """Rows of one writer: steps int64[R]; float64[R] per scalar, NaN where `logged`, bool[R], is false."""

    steps: Int64s
    scalars: Mapping[str, Floats]
    logged: Mapping[str, NDArray[np.bool_]]

    def points(self, name: str) -> tuple[Int64s, Floats]:
        """The steps and values at which a scalar was logged."""
        if name not in self.scalars:
            return self.steps[:0], np.empty(0)
        logged = self.logged[name]
        return self.steps[logged], self.scalars[name][logged]


@dataclass(frozen=True)
class _Words:
    """The message of an alarm, from the smoothed value, the usual value and the onset."""

    message: Callable[[float, float, int], str]
    value: Callable[[float], float]


def grad_norm(state: State, rows: ScalarRows, parameters: Parameters) -> Result:
    """Open when the gradient norm is `factor` times its own past in `points` consecutive points.

    Compares logarithms, see `_rise`. A norm that is not finite counts as above.
    """
    steps, norms = rows.points("grad_norm")
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(norms > 0, np.log(np.where(norms > 0, norms, 1.0)), np.nan)
    logs = np.where(np.isnan(norms) | np.isinf(norms), np.inf, logs)

    def message(now: float, usual: float, onset: int) -> str:
        rise = "is not finite" if math.isinf(now) else f"rose to {in_words(math.exp(now))}"
        return f"Gradient norm {rise} since step {onset:,}, from about {in_words(math.exp(usual))} before."

    return _rise(state, steps, logs, parameters, _Words(message, _exponential))


def throughput_drop(state: State, rows: ScalarRows, parameters: Parameters) -> Result:
    """Open when steps take `factor` times as long as before, over `span` steps.

    Compares the logarithms of `step_seconds`, see `_rise`. Single slow steps, such as those with an
    evaluation or a checkpoint, are clipped.
    """
    steps, seconds = rows.points("step_seconds")
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(seconds > 0, np.log(np.where(seconds > 0, seconds, 1.0)), np.nan)

    def message(now: float, usual: float, onset: int) -> str:
        return (
            f"Steps take {math.exp(now - usual):.3g} times as long since step {onset:,}: about "
            f"{in_words(math.exp(now))} s, {in_words(math.exp(usual))} s before."
        )

    return _rise(state, steps, logs, parameters, _Words(message, _exponential))


def _exponential(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _rise(state: State, steps: Int64s, values: Floats, parameters: Parameters, words: _Words) -> Result:
    """Open when f exceeds l + max(z d, ln `factor`) in `points` consecutive points.

    f, m and d are exponential averages: f of the values over `span` points, m of the values and d of their
    deviation below m over `window`. l is the lowest m, and follows m over FORGET windows. So a slow rise
    counts neither as its own past nor as its own noise. A value enters m and d no further from m than the
    limit times CLIP / z (Huber's clipping), and f no further than twice the limit. So one point moves nothing
    far, and a lasting new level is the past after some FORGET windows: then the alarm closes. Infinite values
    enter f only.

    Args:
        values: float64[n]; NaN is ignored.
        parameters: `z`, `factor`, `span`, `window` (also the points before anything is judged), `points`,
            `recover`.
    """
    fresh = {"last_step": -1, "count": 0, "mean": 0.0, "deviation": 0.0, "fast": 0.0}
    fresh["lowest"] = state.get("mean", 0.0)
    state = {**fresh, "over": 0, "onset": 0, "open": False, "calm": 0, **state}
    findings = []
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if step <= state["last_step"] or math.isnan(value):
            continue
        state["last_step"] = step
        limit = max(parameters["z"] * state["deviation"], math.log(parameters["factor"]))
        judged = state["count"] >= parameters["window"]
        distance = _average(state, value, limit, judged, parameters)
        finding = _count(state, step, distance, judged and distance > limit, value, parameters, words)
        if finding:
            findings.append(finding)
    return state, findings


def _average(state: State, value: float, limit: float, judged: bool, parameters: Parameters) -> float:
    """Update the averages. Returns f - l, with l from before the value."""
    distance = value - state["mean"]
    clipped = max(-2.0 * limit, min(2.0 * limit, distance)) if judged else distance
    if state["count"] == 0:
        state["mean"] = state["fast"] = state["lowest"] = value if math.isfinite(value) else 0.0
        state["count"] = int(math.isfinite(value))
        return 0.0
    usual, lowest = state["mean"], state["lowest"]
    if math.isfinite(clipped):
        weight = 2.0 / (min(state["count"], parameters["span"]) + 1.0)
        state["fast"] += weight * (usual + clipped - state["fast"])
    if math.isfinite(value):
        reach = limit * min(1.0, CLIP / parameters["z"])
        step = max(-reach, min(reach, distance)) if judged else distance
        weight = 1.0 / min(state["count"] + 1.0, parameters["window"])
        state["mean"] += weight * step
        if step <= 0.0 or not judged:
            state["deviation"] += weight * (abs(step) - state["deviation"])
        state["count"] += 1
        risen = lowest + weight / FORGET * (state["mean"] - lowest)
        state["lowest"] = min(risen, state["mean"]) if judged else state["mean"]
    elif parameters["span"] <= 1:
        return math.inf
    return float(state["fast"] - lowest)


def _count(
    state: State, step: int, distance: float, over: bool, value: float, parameters: Parameters, words: _Words
) -> ConditionChange | None:
    if state["open"]:
        state["calm"] = 0 if over else state["calm"] + 1
        if state["calm"] < parameters["recover"]:
            return None
        state.update(open=False, over=0)
        return ConditionChange(opened=False, onset_step=state["onset"], step=step)
    if over and state["over"] == 0:
        state["onset"] = step
    state["over"] = state["over"] + 1 if over else 0
    if state["over"] < parameters["points"]:
        return None
    state.update(open=True, calm=0)
    usual = state["lowest"]
    now = math.inf if math.isinf(value) else usual + distance
    shown = words.value(now)
    return ConditionChange(
        opened=True,
        onset_step=state["onset"],
        step=step,
        value=shown if math.isfinite(shown) else None,
        threshold=words.value(usual) * parameters["factor"],
        message=words.message(now, usual, state["onset"]),
        evidence={"usual": words.value(usual)},
    )


# Average steps as which a step counts at most, and the first steps, which do not count: workers start, and
# the model is compiled.
LONGEST, FIRST_STEPS = 4.0, 5
# An alert ends below this part of the limit: a share that wavers about the limit is one alert, not many.
CALM = 0.9


def data_wait(state: State, rows: ScalarRows, parameters: Parameters) -> Result:
    """Open when the wait for data is more than `share` of the time of `points` consecutive steps, on average.

    The share is the exponential average of `time_data` over that of all five times, over `points` steps. A
    step counts as at most LONGEST times the average one: a single pause, of an epoch's start or of a computer
    that slept, is not a lasting wait. The first FIRST_STEPS do not count. It ends after `recover` steps
    with at most CALM times the share.

    Args:
        parameters: `share`; `points`; `recover`.
    """
    state = {"last_step": -1, "count": 0, "wait": 0.0, "all": 0.0, "open": False, "calm": 0, **state}
    if not all(name in rows.scalars for name in TIMES):
        return state, []
    times = np.stack([np.where(rows.logged[name], rows.scalars[name], np.nan) for name in TIMES])
    findings = []
    weight = 2.0 / (parameters["points"] + 1.0)
    for step, wait, total in zip(rows.steps.tolist(), times[0].tolist(), times.sum(0).tolist(), strict=True):
        if step <= state["last_step"] or not math.isfinite(total) or total <= 0:
            continue
        state["last_step"] = step
        state["count"] += 1
        if state["count"] <= FIRST_STEPS:
            continue
        rate = max(weight, 1.0 / (state["count"] - FIRST_STEPS))
        if state["count"] > 2 * FIRST_STEPS:
            counted = min(1.0, LONGEST * state["all"] / total)
            wait, total = counted * wait, counted * total
        state["wait"] += rate * (wait - state["wait"])
        state["all"] += rate * (total - state["all"])
        share = state["wait"] / state["all"] if state["all"] > 0 else 0.0
        over = state["count"] >= 2 * parameters["points"] and share > parameters["share"]
        if state["open"]:
            state["calm"] = 0 if share > CALM * parameters["share"] else state["calm"] + 1
            if state["calm"] >= parameters["recover"]:
                state["open"] = False
                findings.append(ConditionChange(opened=False, onset_step=state["onset"], step=step))
        elif over:
            onset = max(0, step - int(parameters["points"]))
            state.update(open=True, calm=0, onset=onset)
            message = (
                f"Steps wait for data {percent(share)} of their time since about step {onset:,}, above the "
                f"limit of {percent(parameters['share'])}."
            )
            findings.append(
                ConditionChange(
                    opened=True,
                    onset_step=onset,
                    step=step,
                    value=share,
                    threshold=parameters["share"],
                    message=message,
                )
            )
    return state, findings


def memory_creep(state: State, rows: ScalarRows, parameters: Parameters) -> Result:
    """Open when memory has risen from each block to the next over `blocks` blocks, by `rise` in all.

    A block is `points` readings; its smallest value counts, so that what is freed again is no creep. Reads
    `memory_allocated` of the GPU and, by itself, `memory_anonymous`, or `memory_rss` of agents without it:
    mapped files count as resident while they are cached. The first block is left out, because caches fill.
    Closes at the first block that does not rise.

    Args:
        parameters: `points`, `blocks`, `rise` (relative).
    """
    anonymous = "memory_anonymous" in rows.scalars or "memory_anonymous" in state
    host = "memory_anonymous" if anonymous else "memory_rss"
    after: State = {}
    findings: list[ConditionChange] = []
    for name in ("memory_allocated", host):
        after[name], of_series = _creep(state.get(name, {}), *rows.points(name), parameters, name)
        findings += of_series
    after["open"] = any(after[name]["open"] for name in ("memory_allocated", host))
    return after, sorted(findings, key=lambda finding: finding.step)


def _creep(state: State, steps: Int64s, values: Floats, parameters: Parameters, name: str) -> Result:
    state = {"last_step": -1, "block": [], "blocks": [], "skipped": False, "open": False, **state}
    findings = []
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if step <= state["last_step"] or not math.isfinite(value):
            continue
        state["last_step"] = step
        state["block"] = [*state["block"], [step, value]]
        if len(state["block"]) >= parameters["points"]:
            finding = _next_block(state, step, parameters, name)
            if finding:
                findings.append(finding)
    return state, findings


def _next_block(state: State, step: int, parameters: Parameters, name: str) -> ConditionChange | None:
    smallest = [state["block"][0][0], min(value for _, value in state["block"])]
    state["block"] = []
    if not state["skipped"]:
        state["skipped"] = True
        return None
    rises = bool(state["blocks"]) and smallest[1] > state["blocks"][-1][1] * (1.0 + MIN_RISE)
    state["blocks"] = [*state["blocks"], smallest][-int(parameters["blocks"]) :] if rises else [smallest]
    if state["open"]:
        if rises:
            return None
        state["open"] = False
        return ConditionChange(opened=False, onset_step=state["onset"], step=step)
    first, last = state["blocks"][0], state["blocks"][-1]
    if len(state["blocks"]) < parameters["blocks"] or last[1] < first[1] * (1.0 + parameters["rise"]):
        return None
    state.update(open=True, onset=first[0])
    where = "GPU" if name == "memory_allocated" else "main"
    message = (
        f"The {where} memory in use rises steadily since step {first[0]:,}: from {first[1] / 2**20:,.0f} to "
        f"{last[1] / 2**20:,.0f} MiB."
    )
    limit = first[1] * (1.0 + parameters["rise"])
    return ConditionChange(
        opened=True,
        onset_step=first[0],
        step=step,
        value=last[1],
        threshold=limit,
        message=message,
        evidence={"scalar": name},
    )
