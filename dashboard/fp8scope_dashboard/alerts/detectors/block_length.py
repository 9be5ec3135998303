"""The length of blocks whose means are nearly uncorrelated, from the past of a series.

The means of successive blocks of 1, 2, 4, ... points are correlated less the longer the blocks are. Sums of
their products are kept for each length: O(log n) numbers for n points. When the number of points reaches a
power of two, the sums of each of the last two epochs (the points from n/4 to n/2 and to n) give, for each
length, the variance of a block's mean, and its covariance with the next block's mean: the part of the noise
that lasts longer than a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fp8scope_dashboard.alerts.detectors.base import State

# Correlation of successive blocks up to which they count as uncorrelated.
MOST_CORRELATION = 0.25
# Standard errors by which the correlation may exceed that.
SLACK = 0.5
# A length is used only if an epoch has so many blocks of it: the correlation of fewer says nothing.
LEAST_BLOCKS = 24
FIRST_CHECKPOINT = 128
# The largest correlation, and the largest share of the variance in the means, that few blocks can show.
MOST_MEASURED, MOST_TAKEN = 0.98, 0.8
# Values further from the centre than this many mean absolute deviations are clipped: single outliers would
# hide the correlation of all other values.
CLIP, MEMORY = 8.0, 64.0


@dataclass(frozen=True)
class Blocks:
    """A choice of the block length.

    Attributes:
        length: points.
        variance: of a block's mean.
        correlation: of the means of successive blocks, corrected for bias; not negative.
        lasting: standard deviation of noise that lasts longer than the blocks; 0 if the blocks count as
            uncorrelated.
        independent: how many independent blocks show it.
    """

    length: int
    variance: float
    correlation: float
    lasting: float
    independent: float


def fresh() -> State:
    """The state before the first point."""
    return {"count": 0, "centre": 0.0, "deviation": 0.0, "scales": [], "before": []}


def add(state: State, value: float) -> bool:
    """Add a finite value; return whether the block length may be chosen again now."""
    state["count"] += 1
    value = _clipped(state, value)
    for level in range(64):
        if level == len(state["scales"]):
            state["scales"].append(_empty())
        scale = state["scales"][level]
        _add_block(scale, value)
        if scale["waiting"] is None:
            scale["waiting"] = value
            break
        value, scale["waiting"] = 0.5 * (scale["waiting"] + value), None
    count = int(state["count"])
    return count >= FIRST_CHECKPOINT and count & (count - 1) == 0


def choose(state: State, least: int) -> Blocks | None:
    """The shortest block of at least `least` points whose means count as uncorrelated, also in larger blocks.

    Call it when `add` returns True; it starts the next epoch. Without such a length the result is the
    shortest one with its `lasting` noise. None while there are too few points.
    """
    points = state["count"] / 2.0
    measured = [
        _calmest(
            2**level, [epoch[level] for epoch in (state["before"], state["scales"]) if level < len(epoch)]
        )
        for level in range(len(state["scales"]))
    ]
    longest_before = 2.0 ** (sum(scale["n"] >= LEAST_BLOCKS for scale in state["before"]) - 1)
    state["before"] = [{**scale, "waiting": None} for scale in state["scales"]]
    state["scales"] = [{**_empty(), "waiting": scale["waiting"]} for scale in state["scales"]]
    usable = [blocks for blocks in measured if blocks is not None and blocks.length >= least]
    if not usable:
        return None
    chosen = None
    for blocks in reversed(usable):
        if blocks.correlation > MOST_CORRELATION + SLACK * math.sqrt(blocks.length / points):
            break
        chosen = blocks
    if chosen is not None:
        return replace(chosen, lasting=0.0)
    # Of long blocks only the latest epoch has enough, and a rise may be in it.
    seen_before = [blocks for blocks in usable if blocks.length <= longest_before]
    largest = max(seen_before or usable, key=lambda blocks: blocks.lasting)
    return replace(usable[0], lasting=largest.lasting, independent=largest.independent)


def _empty() -> State:
    return {"n": 0, "sum": 0.0, "squares": 0.0, "products": 0.0, "first": 0.0, "last": 0.0, "waiting": None}


def _clipped(state: State, value: float) -> float:
    """The value, at most CLIP mean absolute deviations from the moving centre."""
    reach = CLIP * state["deviation"] if state["count"] > FIRST_CHECKPOINT // 2 else math.inf
    difference = min(max(value - state["centre"], -reach), reach)
    if reach == 0.0:
        difference = value - state["centre"]
    gain = 1.0 / min(state["count"], MEMORY)
    clipped = state["centre"] + difference
    state["centre"] += gain * difference
    state["deviation"] += gain * (abs(difference) - state["deviation"])
    return float(clipped)


def _add_block(scale: State, value: float) -> None:
    if scale["n"]:
        scale["products"] += scale["last"] * value
    else:
        scale["first"] = value
    scale["n"] += 1
    scale["sum"] += value
    scale["squares"] += value * value
    scale["last"] = value


def _calmest(length: int, epochs: list[State]) -> Blocks | None:
    """From the epoch in which less noise outlasts the blocks: a rise is in one of two only."""
    measured = [_measure(length, epoch) for epoch in epochs if epoch["n"] >= LEAST_BLOCKS]
    return min(measured, key=lambda blocks: blocks.lasting, default=None)


def _measure(length: int, epoch: State) -> Blocks:
    """About the epoch's mean, with Kendall's (1954) correction of the correlation."""
    n, mean = epoch["n"], epoch["sum"] / epoch["n"]
    squares = epoch["squares"] - n * mean * mean
    if squares <= 0.0:
        return Blocks(length, 0.0, 0.0, 0.0, float(n))
    ends = epoch["first"] + epoch["last"]
    raw = (epoch["products"] - mean * (2.0 * epoch["sum"] - ends) + (n - 1) * mean * mean) / squares
    corrected = min(max(raw + (1.0 + 3.0 * raw) / n, 0.0), MOST_MEASURED)
    independent = n * (1.0 - corrected) / (1.0 + corrected)
    # The mean takes a part of the variance away.
    variance = squares / n / (1.0 - min(1.0 / independent, MOST_TAKEN))
    return Blocks(length, variance, corrected, math.sqrt(corrected * variance), independent)
