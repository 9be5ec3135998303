"""The tolerance of a run of the same configuration above the mean of its baseline's seeds.

Two runs that differ only in their seed differ by an offset that lasts, and changes slowly. Points are
averaged over stretches of a geometric grid, each a quarter longer than the one before.

* *Own spread*: the product of a seed's deviations from the mean of the seeds in two stretches that do not
  adjoin has, as mean, the square of its lasting offset: batch noise is independent between them and drops
  out. Products are summed over the K seeds, divided by K - 1, and averaged exponentially.
* *Prior spread*: that of public runs (`analysis.losses.seeds.PUBLIC`), or more while the loss falls fast.
  Seeds differ in how fast they learn: on public curves their offset is .2 to 1.4 % of the loss's slope over
  the logarithm of the steps, and most early. So LAG times that slope (early: EARLY_LAG) is the prior spread
  if it is larger.

The two are combined as for verdicts (`seeds.shrunk`), but seeds that agree do not lower the tolerance below
that of the prior: how far some runs have varied does not bound how far another one may.

An alarm looks at the whole run, in which the offset takes several nearly independent values. So the
tolerance is the two-sided quantile of Student's t at the level alpha / VALUES, times the spread, times
sqrt(1 + 1/K), and at least that for K = 1 by the prior alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from fp8scope_dashboard.analysis.losses.onsets.base import State
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, Prior, shrunk
from fp8scope_dashboard.statistics.student import upper_quantile
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

# Share of its steps by which a seed is ahead of or behind another one (one standard deviation): in the early
# points, and what is left of it later. On the 15B runs it is .8 % at 150 points and .2 to .6 % after 300.
EARLY_LAG, LAG, EARLY_POINTS = 0.0075, 0.005, 768
# Degrees of freedom of the prior spread: those of public groups, see `benchmarks/verdicts.py --prior`.
PRIOR_FREEDOM = 7.0
# Own spreads beyond this quantile of F are used without the prior: those of configurations unlike public
# ones.
CONFLICT = 0.999
# Nearly independent values of an offset between two runs in the course of a run.
VALUES = 4.5
# Points of the first stretch; each later one is longer by a factor.
FIRST_STRETCH = 8
GROWTH = 1.25
# Weight of a new product in the average. Its square root is the memory in stretches.
WEIGHT = 0.3


def fresh() -> State:
    """The state before the first point."""
    return {
        "count": 0,
        "end": FIRST_STRETCH,
        "start": 0,
        "levels": 0.0,
        "last_level": None,
        # How fast the loss falls, in the last stretch and in the one that has begun.
        "slope": 0.0,
        "begun": 0.0,
        "sums": [],
        "counts": [],
        "past": [],
        "spread": None,
        "freedom": 0,
    }


def add(state: State, seeds: Sequence[float | None], mean: float) -> bool:
    """Add the seeds' losses at one step and their mean; return whether the tolerance may have changed.

    A seed without a finite value is None. Seeds may be appended later, but do not change their place.
    """
    state["count"] += 1
    state["levels"] += mean
    sums, counts = state["sums"], state["counts"]
    while len(sums) < len(seeds):
        sums.append(0.0)
        counts.append(0)
    if abs(mean) >= SMALLEST and len(seeds) > 1:
        for i, seed in enumerate(seeds):
            if seed is not None:
                sums[i] += min(max((seed - mean) / abs(mean), -LARGEST), LARGEST)
                counts[i] += 1
    if state["count"] < state["end"]:
        points = state["count"] - state["start"]
        if points % FIRST_STRETCH:
            return False
        # A loss that has begun to fall fast must not wait for the end of the stretch.
        state["begun"] = _slope(state, points)
        return True
    _end_stretch(state)
    return True


def _end_stretch(state: State) -> None:
    points = state["count"] - state["start"]
    state["slope"], state["begun"] = _slope(state, points), 0.0
    state["last_level"] = _level(state, points)
    _learn(state, points)
    state.update(start=state["count"], levels=0.0, sums=[], counts=[])
    state["end"] = math.ceil(state["count"] * GROWTH)


def _level(state: State, points: int) -> list[float]:
    """The mean loss of the latest stretch, and the logarithm of its middle."""
    return [state["levels"] / points, math.log(state["start"] + 0.5 * points)]


def _slope(state: State, points: int) -> float:
    """Return how fast the loss falls over the logarithm of the steps, relative to the loss."""
    level, middle = _level(state, points)
    if state["last_level"] is None or abs(level) < SMALLEST:
        return float(state["slope"])
    before, then = state["last_level"]
    return float(min(max((before - level) / abs(level) / (middle - then), 0.0), LARGEST))


def _learn(state: State, points: int) -> None:
    """Products of the deviations of this stretch and the one before the last."""
    present = [
        total / count if 2 * count >= points else None
        for total, count in zip(state["sums"], state["counts"], strict=True)
    ]
    state["past"] = [*state["past"], present][-3:]
    if len(state["past"]) < 3:
        return
    pairs = [
        (a, b) for a, b in zip(state["past"][0], present, strict=False) if a is not None and b is not None
    ]
    if len(pairs) < 2:
        return
    # Seeds that are missing in a stretch shift the mean of the others.
    ours, theirs = (sum(levels) / len(pairs) for levels in zip(*pairs, strict=True))
    product = sum((a - ours) * (b - theirs) for a, b in pairs) / (len(pairs) - 1)
    product = min(max(product, -LARGEST), LARGEST)
    spread = product if state["spread"] is None else state["spread"] + WEIGHT * (product - state["spread"])
    state.update(spread=spread, freedom=len(pairs) - 1)


def tolerance(
    state: State, seeds: int, alpha: float, *, prior: float = PUBLIC.spread, early: bool = False
) -> float:
    """The relative excess over the mean of so many seeds that a run of the same configuration may have.

    With `early` the one that it may have had in its early points, if the loss fell then as it does now.

    Seeds that spread more than the prior raise it. Seeds that agree do not lower it: they say how far they
    have varied themselves, not how far the run may.

    Args:
        prior: spread between the seeds of the project's groups; that of public runs counts if it is larger.
    """
    share = 1.0 if early else min(EARLY_POINTS / max(state["count"], 1), 1.0) ** 3
    lag = LAG + share * (EARLY_LAG - LAG)
    of_slope = lag * max(state["slope"], state["begun"])
    expected = Prior(max(PUBLIC.spread, prior, of_slope), PRIOR_FREEDOM)
    least = usual(alpha) * expected.spread / PUBLIC.spread
    own = max(state["spread"] or 0.0, 0.0)
    variance, freedom, conflict = shrunk(own, float(state["freedom"]), expected, CONFLICT)
    # The own spread of few seeds has a wide quantile as it is.
    quantile = _quantile(freedom, alpha if conflict else alpha / VALUES)
    seen = quantile * math.sqrt(variance) * math.sqrt(1.0 + 1.0 / max(seeds, 1))
    return min(max(least, seen), LARGEST)


def usual(alpha: float) -> float:
    """The tolerance while the loss falls slowly, by the prior alone: of the difference of two runs."""
    return float(_quantile(PRIOR_FREEDOM, alpha / VALUES) * PUBLIC.spread * math.sqrt(2.0))


@lru_cache(maxsize=256)
def _quantile(freedom: float, alpha: float) -> float:
    """Two-sided, of Student's t."""
    return upper_quantile(0.5 * alpha, freedom)
