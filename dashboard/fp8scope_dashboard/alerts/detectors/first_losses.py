"""Divergence in the first points of a run, before its past levels are known: judged against its first losses.

The reference is the median of the first FIRST accepted losses; the lowest level is the lowest median of SPAN
neighbours so far. A loss rises for some steps after initialisation in healthy runs. So the limit is

* while the loss has fallen by less than LEARNED of the reference: the reference and UNLEARNED_RISE of it;
* after that: the lowest level and RISE of it, or LOST of what the loss had fallen, whichever is more.

In both cases the rise is at least `sigmas` deviations of the noise, which the differences of neighbours show.
Losses above the limit are not accepted, so that a divergence does not become its own reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fp8scope_dashboard.alerts.detectors.base import State
from fp8scope_dashboard.alerts.detectors.levels import DIFFERENCE_TO_DEVIATION

FIRST = 5
SPAN = 5
LEARNED = 0.2
UNLEARNED_RISE = 1.0
RISE = 0.3
LOST = 0.5
# Points after which a fall counts as learned: a few low batches at the beginning are none.
LEARNED_POINTS = 16
# Losses without which nothing is judged.
LEAST_ACCEPTED = 2


@dataclass(frozen=True)
class EarlyRise:
    """A rise of the first losses.

    Attributes:
        onset: the step of its first loss above the limit.
        level: the median of the last SPAN losses.
        reference: the level of the first losses; low, limit, sigma: see the module's docstring.
    """

    onset: int
    level: float
    reference: float
    low: float
    limit: float
    sigma: float


def fresh() -> State:
    """The state before the first point."""
    return {"accepted": [], "recent": [], "since": None, "above": 0}


def is_rising(state: State) -> bool:
    """Whether the level is above the limit now."""
    return bool(state["above"])


def judge(state: State, step: int, loss: float, parameters: Mapping[str, float]) -> EarlyRise | None:
    """Add a point; return the rise once the level has been above the limit for `points` points in a row.

    Args:
        parameters: `sigmas`; `points`.
    """
    accepted: list[float] = state["accepted"]
    state["recent"] = [*state["recent"], loss][-SPAN:]
    if len(accepted) < LEAST_ACCEPTED:
        state["accepted"] = [*accepted, loss]
        return None
    reference, low, limit, sigma = _limit(accepted, parameters["sigmas"])
    level = statistics.median(state["recent"])
    if loss <= limit:
        state["accepted"] = [*accepted, loss]
    elif state["since"] is None:
        state["since"] = step
    if level <= limit:
        state["above"] = 0
        if loss <= limit:
            state["since"] = None
        return None
    state["above"] += 1
    if state["above"] < parameters["points"]:
        return None
    onset = step if state["since"] is None else int(state["since"])
    state.update(since=None, above=0, recent=[])
    return EarlyRise(onset, level, reference, low, limit, sigma)


def _limit(accepted: list[float], sigmas: float) -> tuple[float, float, float, float]:
    """The level of the first losses, the lowest level, the limit, and the deviation of the noise."""
    reference = statistics.median(accepted[:FIRST])
    spans = range(max(len(accepted) - SPAN + 1, 1))
    low = min(reference, *(statistics.median(accepted[i : i + SPAN]) for i in spans))
    differences = [abs(b - a) for a, b in zip(accepted, accepted[1:], strict=False)]
    sigma = DIFFERENCE_TO_DEVIATION * statistics.median(differences)
    if len(accepted) < LEARNED_POINTS or reference - low < LEARNED * abs(reference):
        return reference, low, reference + max(UNLEARNED_RISE * abs(reference), sigmas * sigma), sigma
    rise = max(RISE * abs(low), LOST * (reference - low), sigmas * sigma)
    return reference, low, low + rise, sigma
