"""Divergence of one run: its loss has risen far, and stays up or keeps rising.

The level of the loss now is the median of the last `span` points: a spike of half of them does not move it.
It is compared with past levels (`levels`). Healthy losses rise as well: after a warm restart, with another
mixture of the data, between alternating sources, in a hump of the warm-up, or by noise that lasts. So a rise
counts only if it is

* above the lowest recent level by `fraction` of it, by `sigmas` deviations of a level (slow variations
  included), and by DESCENT of all that the loss has fallen since its first level;
* above the highest level of the recent half of the run, by a quarter of the first and half of the second.

A loss that has doubled since its first level, and never fallen far below that, rises by itself: that of an
actor in reinforcement learning does, with what it learns. It must rise OWN_RISES times as far above its
highest level as that is above its lowest, or explode.

A rise that lasts enters the past and looks like a slow variation. So a gross one, of GROSS times the
fraction, is judged by the levels up to the lowest recent one alone.

A rise of that size is a divergence after `points` points. A rise of half that size is one if it keeps rising:
its last third is above its middle third, which is above its first.

While the past is as short as YOUNG points, a rise that stays below the first level must last four times as
long, for the reason that `first_losses` has.

The past is known after some 100 points. Until then the loss is judged against its first values
(`first_losses`).

A divergence ends when the level falls to half of the limit. It also ends when the loss has been stable for
`settle` points: the new level is the past from then on, so that a later rise is found.
"""

from __future__ import annotations

import copy
import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import first_losses, levels
from fp8scope_dashboard.alerts.detectors.base import ConditionChange, State, began, in_words, percent, usable
from fp8scope_dashboard.alerts.detectors.levels import PastLevels

# Share of the descent of the loss that a rise must undo.
DESCENT = 0.05
# So many times the least rise, it is judged by the levels before it.
GROSS = 1.5
# A slow rise takes at least so many points, and this share of the run.
SLOW_POINTS, SLOW_SHARE = 100, 0.05
# Points after which the past is known.
PAST_POINTS = levels.FINE * (levels.MIN_LEVELS + levels.DELAY)
# How often a loss that rises by itself may repeat its whole rise within the points that are not past yet.
OWN_RISES = 2.0
# Points up to which a past has not seen all that a loss does by itself.
YOUNG = 2 * PAST_POINTS
# A rise to more than this many times the level is written as a factor.
MAX_PERCENT = 5.0
# Share of its level, and deviations of a level, by which a settled loss may still change.
SETTLED_SHARE, SETTLED_SIGMAS = 0.02, 2.0


def divergence(
    state: State, steps: NDArray[np.int64], losses: NDArray[np.float64], parameters: Mapping[str, float]
) -> tuple[State, list[ConditionChange]]:
    """Open when the loss has diverged, see above; close when it has recovered or settled.

    Args:
        steps: int64[n]; those that are not above the last one are ignored.
        losses: float64[n]; those that are not finite are ignored: see `not_finite`.
        parameters: `fraction` of the lowest level; `sigmas`; `points`, `span`, `settle` in points.
    """
    state = {**_fresh(), **copy.deepcopy(state)}
    ordered = sorted(state["window"])
    findings = []
    for step, loss in zip(steps.tolist(), losses.tolist(), strict=True):
        if not usable(loss) or (state["last_step"] is not None and step <= state["last_step"]):
            continue
        state["last_step"] = step
        state["count"] += 1
        median = _median(state, ordered, step, loss, int(parameters["span"]))
        finding = (_while_open if state["open"] else _watch)(state, step, loss, median, parameters)
        if finding:
            findings.append(finding)
    return state, findings


def _fresh() -> State:
    return {
        "first_step": None,
        "last_step": None,
        "count": 0,
        "window": [],
        "window_steps": [],
        "levels": levels.fresh(),
        # The first losses, until the past is known.
        "early": first_losses.fresh(),
        # The lowest past level, the limit, and the deviation of a level; None while too little is known.
        "low": None,
        "limit": None,
        "sigma": None,
        "above": 0,
        "open": False,
        "onset": None,
        "calm": 0,
        # Points and levels since it opened.
        "block": [],
        "since": [],
    }


def _median(state: State, ordered: list[float], step: int, loss: float, span: int) -> float:
    window, window_steps = state["window"], state["window_steps"]
    window.append(loss)
    window_steps.append(step)
    insort(ordered, loss)
    while len(window) > span:
        del ordered[bisect_left(ordered, window.pop(0))]
        del window_steps[0]
    return ordered[len(ordered) // 2]


def _watch(
    state: State, step: int, loss: float, median: float, parameters: Mapping[str, float]
) -> ConditionChange | None:
    if state["first_step"] is None:
        state["first_step"] = step
    early = _early(state, step, loss, parameters)
    if early:
        return early
    changed = levels.add(state["levels"], loss)
    limit = state["limit"]
    elevated = limit is not None and median > limit
    state["above"] = state["above"] + _weight(state, median) if elevated else 0
    if state["above"] >= first_losses.FULL * parameters["points"]:
        return _open(state, _onset(state, limit, step), step, median)
    if elevated or not changed:
        return None
    past = levels.past(state["levels"])
    if past is None:
        return None
    usual = _usual_rise(state, past)
    limit = max(min(_limit(past, 1.0, parameters), _gross_limit(state, parameters)), usual)
    state.update(low=past.low, limit=limit, sigma=past.deviation)
    if median <= usual:
        return None
    points = _rising_points(state, past, median, parameters)
    if not points:
        return None
    state["limit"] = _limit(past, 0.5, parameters, high=past.low)
    return _open(state, step - round(points * _spacing(state, step)), step, median)


def _weight(state: State, median: float) -> int:
    """Return what a point above the limit counts.

    FULL, or 1 below the first level of a run with a short past.
    """
    is_full = state["count"] > YOUNG or median > state["levels"]["first"]
    return first_losses.FULL if is_full else 1


def _early(state: State, step: int, loss: float, parameters: Mapping[str, float]) -> ConditionChange | None:
    """Judge a point against the first losses, while the past is unknown or a rise is being judged."""
    early = state["early"]
    if early is None:
        return None
    if state["limit"] is not None and not first_losses.is_rising(early):
        state["early"] = None
        return None
    rise = first_losses.judge(early, step, loss, parameters)
    if rise is None:
        return None
    state.update(low=rise.low, limit=rise.limit, sigma=rise.sigma)
    note = (
        f" It is judged against the first losses, of about {in_words(rise.reference)}: the run's own past is "
        f"known after {PAST_POINTS} points."
    )
    return _open(state, rise.onset, step, rise.level, note)


def _onset(state: State, limit: float, step: int) -> int:
    """The first step of the rise: in the window, or as many levels back as are above the limit."""
    steps, window = state["window_steps"], state["window"]
    first = next(i for i, value in enumerate(window) if value > limit)
    points = levels.points_above(state["levels"], limit)
    if first > 0 or points <= len(window):
        return int(steps[first])
    return max(int(state["first_step"]), step - round(points * _spacing(state, step)))


def _spacing(state: State, step: int) -> float:
    """Mean number of steps from one point to the next."""
    return float(step - state["first_step"]) / float(state["count"])


def _rising_points(state: State, past: PastLevels, median: float, parameters: Mapping[str, float]) -> int:
    """For how many points the loss has risen, by half of the limit's size or more, and still does; else 0."""
    recent = levels.recent_half(state["levels"])
    lowest = recent.index(min(recent))
    rise = recent[lowest:]
    points = len(rise) * state["levels"]["size"] * levels.FINE
    if len(rise) < 6 or points < max(SLOW_POINTS, SLOW_SHARE * state["count"]):
        return 0
    if median < _limit(past, 0.5, parameters, high=max(recent[: lowest + 1])):
        return 0
    third = len(rise) // 3
    first, middle, last = (
        sum(part) / third for part in (rise[:third], rise[third : 2 * third], rise[-third:])
    )
    rises = last > middle + past.deviation and middle > first + past.deviation and median > last
    return points if rises else 0


def _limit(
    past: PastLevels, share: float, parameters: Mapping[str, float], high: float | None = None
) -> float:
    """The lowest level that counts as diverged, for a share of the full size."""
    fraction, sigmas = share * parameters["fraction"] * abs(past.low), parameters["sigmas"] * past.deviation
    descent = share * DESCENT * (past.first - past.low)
    before = past.high if high is None else high
    return float(max(past.low + max(fraction, sigmas, descent), before + max(fraction / 4.0, sigmas / 2.0)))


def _gross_limit(state: State, parameters: Mapping[str, float]) -> float:
    """The level from which a rise counts whatever it has done to the past; infinite while that is unknown."""
    before = levels.before_rise(state["levels"])
    if before is None:
        return math.inf
    least = before.low + GROSS * parameters["fraction"] * abs(before.low)
    return max(least, _limit(before, 1.0, parameters))


def _usual_rise(state: State, past: PastLevels) -> float:
    """The level up to which a loss that rises by itself may rise; minus infinity for other losses."""
    low, high = levels.extremes(state["levels"])
    first = abs(past.first)
    has_fallen = past.first - low >= first_losses.LEARNED * first
    if has_fallen or high - past.first < first_losses.UNLEARNED_RISE * first:
        return -math.inf
    return min(high + OWN_RISES * (high - low), first_losses.EXPLODED * max(1.0, first))


def _open(state: State, onset: int, step: int, median: float, note: str = "") -> ConditionChange:
    low, limit = state["low"], state["limit"]
    state.update(open=True, onset=onset, calm=0, block=[], since=[])
    above = f", {_higher(median / low)}" if low > 0 else ""
    message = (
        f"Loss rose from a level of {in_words(low)} to {in_words(median)} at step {step:,}{above}; it is "
        f"above the limit of {in_words(limit)}. {began(onset)}{note}"
    )
    return ConditionChange(
        opened=True,
        onset_step=onset,
        step=step,
        value=median,
        threshold=limit,
        message=message,
        evidence={"minimum": low, "sigma": state["sigma"]},
    )


def _higher(factor: float) -> str:
    """A rise in words. Beyond a few hundred per cent a factor is easier to read."""
    return f"{percent(factor - 1.0)} higher" if factor < MAX_PERCENT else f"{in_words(factor)} times as high"


def _while_open(
    state: State, step: int, loss: float, median: float, parameters: Mapping[str, float]
) -> ConditionChange | None:
    half = 0.5 * (state["low"] + state["limit"])
    state["calm"] = state["calm"] + 1 if median < half else 0
    if state["calm"] >= parameters["points"]:
        # What waits to become the past is part of the rise.
        past = {**state["levels"], "waiting": [], "block": []}
        return _close(state, past, step, median, f"Loss is back at {in_words(median)} at step {step:,}.")
    state["block"] = [*state["block"], loss]
    if len(state["block"]) < levels.FINE:
        return None
    needed = max(math.ceil(parameters["settle"] / levels.FINE), levels.MIN_LEVELS)
    state["since"] = [*state["since"], statistics.median(state["block"])][-needed:]
    state["block"] = []
    if len(state["since"]) < needed or not _is_settled(state["since"]):
        return None
    # The past begins with the new level, so that a later rise is compared with it.
    past = levels.restarted(state["since"])
    return _close(state, past, step, median, f"Loss has settled at {in_words(median)} at step {step:,}.")


def _is_settled(since: Sequence[float]) -> bool:
    """Return whether the second half of these levels is not above the first, but for noise."""
    half = len(since) // 2
    before, after = sum(since[:half]) / half, sum(since[-half:]) / half
    return after - before <= max(SETTLED_SHARE * abs(before), SETTLED_SIGMAS * levels.deviation(since))


def _close(state: State, past: State, step: int, median: float, message: str) -> ConditionChange:
    if levels.past(past) is not None:
        state["early"] = None
    state.update(open=False, above=0, block=[], since=[], limit=None, levels=past)
    return ConditionChange(
        opened=False, onset_step=state["onset"], step=step, value=median, threshold=None, message=message
    )
