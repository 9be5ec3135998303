"""The past levels of a loss, in bounded memory, and how far its level varies by itself.

A level is the median of FINE successive points, so that single outliers do not count. Levels wait until DELAY
later ones have come: a rise that is being judged must not raise its own limit. Then they enter two rings: the
RING latest fine levels, and coarse levels over the whole past, each the mean of as many fine ones as needed
to have at most RING of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fp8scope_dashboard.alerts.detectors.base import State
from fp8scope_dashboard.statistics.robust import MAD_TO_SIGMA
from fp8scope_dashboard.statistics.serial_noise import unbiased

FINE = 8
DELAY = 5
RING = 32
# With fewer levels nothing is known of the past.
MIN_LEVELS = 8
# The largest correlation, and the largest share of the variance in the trend, that few levels can show.
MAX_CORRELATION, MAX_TAKEN = 0.98, 0.8
# How much closer than a straight line a curve that only falls must be to the levels.
FOLLOWS = 1.5
# Standard deviation of normal values over the median size of their differences.
DIFFERENCE_TO_DEVIATION = MAD_TO_SIGMA / math.sqrt(2.0)
# The share by which a deviation that so many independent levels show may be larger.
FEW = 2.0


@dataclass(frozen=True)
class PastLevels:
    """The levels of the recent half of the past.

    Attributes:
        first: the first level of all; low, high: the lowest and the highest of the recent half.
        deviation: standard deviation of a fine level about its trend, slow variations included.
    """

    first: float
    low: float
    high: float
    deviation: float


def fresh() -> State:
    """The state before the first point."""
    return {"block": [], "waiting": [], "first": None, "fine": [], "coarse": [], "size": 1, "part": [0, 0.0]}


def add(state: State, value: float) -> bool:
    """Add a point; return whether the past has changed."""
    state["block"] = [*state["block"], value]
    if len(state["block"]) < FINE:
        return False
    state["waiting"] = [*state["waiting"], statistics.median(state["block"])]
    state["block"] = []
    if len(state["waiting"]) <= DELAY:
        return False
    level, *state["waiting"] = state["waiting"]
    _enter(state, level)
    return True


def restarted(levels: Sequence[float]) -> State:
    """A state whose past is these levels."""
    state = fresh()
    for level in levels:
        _enter(state, level)
    return state


def past(state: State) -> PastLevels | None:
    """The past; None while there is too little of it."""
    if len(state["fine"]) < MIN_LEVELS:
        return None
    recent = recent_half(state)
    both = [*recent, *state["fine"]] if state["size"] > 1 else recent
    spread = max(deviation(state["fine"]), deviation(recent))
    return PastLevels(state["first"], min(both), max(both), spread)


def extremes(state: State) -> tuple[float, float]:
    """The lowest and the highest level of the whole past, which must not be empty."""
    every = [*state["coarse"], *state["fine"]]
    return min(every), max(every)


def before_rise(state: State) -> PastLevels | None:
    """The past up to its lowest recent level: a rise since then is not its own noise. None if that is short.

    `high` reaches as many levels back from the lowest one as the recent half has, so that a loss that still
    falls there counts as high.
    """
    recent, coarse = recent_half(state), state["coarse"]
    if not recent:
        return None
    lowest = len(coarse) - len(recent) + recent.index(min(recent))
    before = coarse[: lowest + 1]
    if len(before) < 2 * MIN_LEVELS:
        return None
    steps = [abs(b - a) for a, b in zip(state["fine"], state["fine"][1:], strict=False)]
    # Coarse levels are means, which scatter less than the level that is judged.
    scatter = DIFFERENCE_TO_DEVIATION * statistics.median(steps) if steps else 0.0
    stretch = before[-len(recent) :]
    spread = max(deviation(stretch), deviation(before[-RING:]), scatter)
    return PastLevels(state["first"], min(recent), max(stretch), spread)


def points_above(state: State, limit: float) -> int:
    """Return the number of latest points in levels above a limit, in whole levels without a gap."""
    latest = [*state["fine"], *state["waiting"]]
    lower = next((i for i, level in enumerate(reversed(latest)) if level <= limit), len(latest))
    return lower * FINE + len(state["block"])


def recent_half(state: State) -> list[float]:
    """The coarse levels of the recent half of the past, at least MIN_LEVELS of them if there are."""
    coarse: list[float] = state["coarse"]
    return coarse[-max(len(coarse) // 2, MIN_LEVELS) :]


def _enter(state: State, level: float) -> None:
    if state["first"] is None:
        state["first"] = level
    state["fine"] = [*state["fine"], level][-RING:]
    count, total = state["part"]
    state["part"] = [count + 1, total + level]
    if count + 1 < state["size"]:
        return
    state["coarse"] = [*state["coarse"], (total + level) / (count + 1)]
    state["part"] = [0, 0.0]
    if len(state["coarse"]) >= 2 * RING:
        coarse = state["coarse"]
        state["coarse"] = [0.5 * (a + b) for a, b in zip(coarse[::2], coarse[1::2], strict=True)]
        state["size"] *= 2


def deviation(levels: Sequence[float]) -> float:
    """Standard deviation of serially correlated levels about their trend; 0 for fewer than three levels.

    The trend is a straight line, or a curve that only falls if the levels are far closer to that: it follows
    noise too, so it must be closer by the factor FOLLOWS.
    """
    n = len(levels)
    if n < 3:
        return 0.0
    middle, mean = 0.5 * (n - 1), sum(levels) / n
    slope = sum((i - middle) * level for i, level in enumerate(levels)) * 12.0 / (n * (n * n - 1.0))
    about_line = _spread([level - mean - slope * (i - middle) for i, level in enumerate(levels)])
    falling = _falling(levels)
    about_curve = _spread([level - fitted for level, fitted in zip(levels, falling, strict=True)])
    return min(about_line, FOLLOWS * about_curve)


def _spread(residuals: Sequence[float]) -> float:
    """Standard deviation of serially correlated residuals.

    Few correlated levels vary less about their own trend than about the true one. The variance is corrected
    for that with the number of independent levels n (1 - a) / (1 + a), where a is the correlation of
    successive residuals, with Kendall's (1954) correction of its bias.
    """
    n = len(residuals)
    squares = sum(residual * residual for residual in residuals)
    if squares <= 0.0:
        return 0.0
    raw = sum(a * b for a, b in zip(residuals, residuals[1:], strict=False)) / squares
    corrected = min(max(unbiased(raw, float(n)), 0.0), MAX_CORRELATION)
    independent = n * (1.0 - corrected) / (1.0 + corrected)
    variance = squares / n / (1.0 - min(2.0 / independent, MAX_TAKEN))
    return math.sqrt(variance) * (1.0 + FEW / independent)


def _falling(levels: Sequence[float]) -> list[float]:
    """The closest sequence that never rises, by pooling adjacent violators (Ayer et al., 1955)."""
    pools: list[tuple[float, int]] = []
    for level in levels:
        mean, size = level, 1
        while pools and pools[-1][0] < mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
