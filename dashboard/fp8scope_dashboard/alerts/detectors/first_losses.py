"""Divergence in the first points of a run, before its past levels are known: judged against its first losses.

The reference is the median of the first FIRST accepted losses; the lowest level is the lowest median of SPAN
neighbours so far. The limits are

* once the loss has fallen by LEARNED of the reference, and by more than its noise: the lowest level and RISE
  of it, or all of what the loss had fallen, whichever is more. A rise of LOST of that counts a quarter: it
  must last four times as long. A loss that follows its own predictions (reinforcement learning) rises that
  far whenever its targets are renewed, and falls again;
* before that: UNLEARNED_RISE of the reference above it, at least MIN_UNLEARNED, and as far above the
  highest loss so far as that is above the lowest. A loss that rises from its first point on does so by
  itself, and one that begins near 0 has no scale yet. But EXPLODED times the first losses, or that value
  where they are smaller than 1, is too much for any loss.

In both cases the rise is at least `sigmas` deviations of the noise, which the differences of neighbours show.
Losses above the lower limit are not accepted, so that a divergence does not become its own reference.
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
# After the first FIRST losses, and among them.
UNLEARNED_RISE, FIRST_RISE = 1.0, 4.0
MIN_UNLEARNED = 1.0
RISE = 0.3
LOST = 0.5
EXPLODED = 100.0
# What a point above the upper limit counts, in points above the lower one.
FULL = 4
# Deviations of the noise that a fall exceeds.
LEARNED_SIGMAS = 4.0
# Points after which a fall counts as learned: a few low batches at the beginning are none.
LEARNED_POINTS = 16
# Losses before which only an explosion is judged.
MIN_ACCEPTED = 2


@dataclass(frozen=True, kw_only=True)
class EarlyRise:
    """A rise of the first losses.

    Attributes:
        onset: the step of its first loss above the limit.
        level: the median of the last SPAN losses.
        reference: the level of the first losses; low, sigma: see the module's docstring.
        limit: the lower one of the limits.
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
    """Return whether the level is above the limit now."""
    return bool(state["above"])


def judge(state: State, step: int, loss: float, parameters: Mapping[str, float]) -> EarlyRise | None:
    """Add a point; return the rise once the level has been above the limits for `points` points in a row.

    Args:
        parameters: `sigmas`; `points`.
    """
    accepted: list[float] = state["accepted"]
    state["recent"] = [*state["recent"], loss][-SPAN:]
    if not accepted:
        state["accepted"] = [loss]
        return None
    reference, low, limit, upper, sigma = _limits(accepted, parameters["sigmas"])
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
    state["above"] += FULL if level > upper else 1
    if state["above"] < FULL * parameters["points"]:
        return None
    onset = step if state["since"] is None else int(state["since"])
    state.update(since=None, above=0, recent=[])
    return EarlyRise(onset=onset, level=level, reference=reference, low=low, limit=limit, sigma=sigma)


def _limits(accepted: list[float], sigmas: float) -> tuple[float, float, float, float, float]:
    """The level of the first losses, the lowest level, both limits, and the deviation of the noise."""
    reference = statistics.median(accepted[:FIRST])
    exploded = EXPLODED * max(1.0, *(abs(loss) for loss in accepted[:FIRST]))
    if len(accepted) < MIN_ACCEPTED:
        return reference, reference, exploded, exploded, 0.0
    spans = range(max(len(accepted) - SPAN + 1, 1))
    low = min(reference, *(statistics.median(accepted[i : i + SPAN]) for i in spans))
    differences = [abs(b - a) for a, b in zip(accepted, accepted[1:], strict=False)]
    sigma = DIFFERENCE_TO_DEVIATION * statistics.median(differences)
    learned, beyond_noise = reference - low, sigmas * sigma
    least_learned = max(LEARNED * abs(reference), LEARNED_SIGMAS * sigma)
    if len(accepted) >= LEARNED_POINTS and learned >= least_learned:
        least = max(RISE * abs(low), beyond_noise)
        return reference, low, low + max(LOST * learned, least), low + max(learned, least), sigma
    share = UNLEARNED_RISE if len(accepted) >= FIRST else FIRST_RISE
    risen = reference + max(share * abs(reference), MIN_UNLEARNED, beyond_noise)
    highest, lowest = max(accepted), min(accepted)
    limit = max(risen, min(highest + (highest - lowest), exploded))
    return reference, low, limit, limit, sigma
