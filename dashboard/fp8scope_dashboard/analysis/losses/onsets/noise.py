"""The noise of the means of blocks of a difference, for blocks of 1, 2, 4, ... points.

For each length the state has the Allan variance (Allan, 1966): the mean of (B' - B)^2 / 2 over successive
blocks with the means B and B'. Of white noise it is the variance of a block's mean, and it halves with each
doubling of the length. Noise that outlasts the blocks falls slower, or rises.

* *The run's own difference*: only falls count, twice. Noise falls as often and as far as it rises, and a
  harm only rises: whether it comes at once or over the whole run, it does not count as noise.
* *The seeds' deviations from their mean*: both directions count, because no seed is under suspicion. K seeds
  have K - 1 degrees of freedom.

The larger of the two is what counts. Averages are exponential: a length remembers its last MEMORY pairs.

Noise that lasts for a large part of the run has few pairs. So there is a second measure of it, the *wander*
of means of 64 points, since the number of points was last a power of two, or from there to the one before,
if that is more, of the run:

* how far they have fallen from their highest;
* OWN_RANGE of how far apart the run's lowest and highest are. It is less than a rise, so that a rise gets out
  of it.

With one seed nothing else shows how far such runs part. Several seeds show it themselves (`wandering`).

Noise that outlasts the known blocks may grow to any size, as far as they show. But not at once: in few points
it hardly goes REACHES times as far beyond its highest mean of 16 points as that is above the lowest one
(`reach`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8scope_dashboard.analysis.losses.onsets.base import State
from fp8scope_dashboard.text.numbers import LARGEST

# Pairs of blocks that an average remembers.
MEMORY = 64
# The most degrees of freedom of an average: one of gain 1 / n knows as much as 2 n equal pairs. Of the run's
# own pairs half count, those that fall; of K seeds' pairs K - 1 times as many.
MAX_OWN, MAX_SEEDS = 0.5 * 2.0 * MEMORY, 2.0 * MEMORY
# A length with fewer degrees of freedom shows nothing.
MIN_FREEDOM = 3.0
# Values further from the centre than this many mean absolute deviations are clipped: single outliers would
# hide all other noise. The centre is known after so many points.
CLIP, CENTRE_POINTS, CENTRE_MEMORY = 8.0, 64, 64.0
# The most that a pair counts, in variances, once the variance is known from so many pairs.
MAX_VARIANCES, KNOWN_PAIRS = 16.0, 8
# Level of the means whose wander is measured: 2^6 = 64 points.
WANDER_LEVEL = 6
OWN_RANGE = 0.5
# Points of the means whose range says how far noise may rise at once, how many of them wait until they count,
# how many must have counted, and how many ranges that is.
REACH_POINTS, REACH_DELAY, REACH_KNOWN, REACHES = 16, 2, 6, 2.0
# Least length of blocks that show a random walk.
WALK_LENGTH = 16
# Degrees of freedom from which on a length may be that of the blocks.
ENOUGH_FREEDOM = 8.0
# The most that the variance of noise which still grows does with each doubling: that of a random walk.
MAX_GROWTH = 2.0


@dataclass(frozen=True)
class Scale:
    """The noise of the means of blocks of `length` points: variance, and its degrees of freedom."""

    length: int
    variance: float
    freedom: float


def fresh() -> State:
    """The state before the first point."""
    return {
        "count": 0,
        "centre": 0.0,
        "deviation": 0.0,
        "own": [],
        "seeds": [],
        # `_wander_since` of the time before the number of points was last a power of two.
        "before": [0.0, 0.0],
        "fall": 0.0,
        "highest": None,
        "lowest": None,
        "reached": _fresh_reach(),
    }


def add(state: State, value: float, deviations: Sequence[float | None]) -> float:
    """Add a point.

    Args:
        value: the run's difference to the mean of the seeds, finite.
        deviations: of each seed from that mean; None where a seed has no value. Seeds keep their place.

    Returns:
        How far above the centre the value counts at most: outliers are clipped.
    """
    state["count"] += 1
    if state["count"] >= 2**WANDER_LEVEL and state["count"] & (state["count"] - 1) == 0:
        state.update(before=_wander_since(state), fall=0.0, highest=None, lowest=None)
    clipped = _clipped(state, value)
    # States of earlier versions have none.
    _extend_reach(state.setdefault("reached", _fresh_reach()), clipped)
    mean = _cascade(state["own"], [clipped], falls_only=True)
    if mean is not None and mean[0] is not None:
        state["highest"] = mean[0] if state["highest"] is None else max(state["highest"], mean[0])
        state["lowest"] = mean[0] if state["lowest"] is None else min(state["lowest"], mean[0])
        state["fall"] = max(state["fall"], state["highest"] - mean[0])
    if len(deviations) > 1:
        _cascade(state["seeds"], list(deviations), falls_only=False)
    return clipped


def wander(state: State) -> float:
    """Return how far the difference to a single seed varies, in means of 64 points."""
    fall, own_range = (max(pair) for pair in zip(state["before"][:2], _wander_since(state), strict=True))
    return float(max(fall, OWN_RANGE * own_range))


def reach(state: State) -> float:
    """Return how high the difference to the mean of the seeds may rise at once by itself.

    Infinite if unknown.
    """
    reached = state.get("reached", _fresh_reach())
    if reached["means"] < REACH_KNOWN:
        return math.inf
    low, high = reached["range"]
    return float(max(high, 0.0) + REACHES * (high - low))


def _fresh_reach() -> State:
    """Points and sum of the next mean, the means that wait, the number and the range of those that count."""
    return {"block": [0, 0.0], "waiting": [], "means": 0, "range": None}


def _extend_reach(reached: State, value: float) -> None:
    points, total = reached["block"][0] + 1, reached["block"][1] + value
    if points < REACH_POINTS:
        reached["block"] = [points, total]
        return
    # A rise that is being judged must not raise its own limit.
    waiting: list[float] = [*reached["waiting"], total / points]
    reached.update(block=[0, 0.0], waiting=waiting)
    if len(waiting) <= REACH_DELAY:
        return
    mean = waiting.pop(0)
    low, high = reached["range"] or [mean, mean]
    reached.update(means=reached["means"] + 1, range=[min(low, mean), max(high, mean)])


def _wander_since(state: State) -> list[float]:
    """The largest fall and the range of the run."""
    own = 0.0 if state["highest"] is None else state["highest"] - state["lowest"]
    return [state["fall"], min(own, LARGEST)]


def interrupted(state: State) -> State:
    """The state after points that were left out: no block goes on over the gap."""

    def cut(scales: Sequence[State]) -> list[State]:
        return [{**scale, "last": None, "waiting": None} for scale in scales]

    return {**state, "own": cut(state["own"]), "seeds": cut(state["seeds"]), "highest": None, "lowest": None}


def scales(state: State, seeds: int, runs: float = 1.0) -> list[Scale]:
    """The noise of the difference of the means of so many runs and seeds, by length, shortest first.

    Without gaps in the lengths; ends before the first length that shows too little.
    """
    estimates = []
    # A difference of the means of m runs and K seeds varies by 1/m + 1/K of the variance of one run.
    factor = 1.0 / runs + 1.0 / max(seeds, 1)
    for level in range(max(len(state["own"]), len(state["seeds"]))):
        here = [
            Scale(2**level, weight * sums[level]["variance"], min(sums[level]["freedom"], most))
            for sums, weight, most in (
                (state["own"], 1.0, MAX_OWN),
                (state["seeds"], factor, MAX_SEEDS * max(seeds - 1, 1)),
            )
            if level < len(sums) and sums[level]["freedom"] >= MIN_FREEDOM
        ]
        if not here:
            break
        estimates.append(max(here, key=lambda scale: scale.variance))
    return estimates


def _clipped(state: State, value: float) -> float:
    """The value, at most CLIP mean absolute deviations from the moving centre."""
    difference = value - state["centre"]
    reach = CLIP * state["deviation"]
    if state["count"] > CENTRE_POINTS and reach > 0.0:
        difference = min(max(difference, -reach), reach)
    gain = 1.0 / min(state["count"], CENTRE_MEMORY)
    clipped = state["centre"] + difference
    state["centre"] += gain * difference
    state["deviation"] += gain * (abs(difference) - state["deviation"])
    return float(clipped)


def _cascade(
    levels: list[State], values: list[float | None], *, falls_only: bool
) -> list[float | None] | None:
    """Add the means of the blocks that end with this point; return that of level WANDER_LEVEL, if any."""
    wandering = None
    for level in range(64):
        if level == len(levels):
            levels.append({"pairs": 0, "freedom": 0.0, "variance": 0.0, "last": None, "waiting": None})
        scale = levels[level]
        if level == WANDER_LEVEL:
            wandering = values
        if scale["last"] is not None:
            _add_pair(scale, values, falls_only=falls_only)
        scale["last"] = values
        if scale["waiting"] is None:
            scale["waiting"] = values
            break
        values = [
            None if a is None or b is None else 0.5 * (a + b)
            for a, b in zip(scale["waiting"], values, strict=False)
        ]
        scale["waiting"] = None
    return wandering


def _add_pair(scale: State, values: Sequence[float | None], *, falls_only: bool) -> None:
    changes = [b - a for a, b in zip(scale["last"], values, strict=False) if a is not None and b is not None]
    if falls_only:
        square, freedom = (min(changes[0], 0.0) ** 2, 0.5) if changes else (0.0, 0.0)
    else:
        # The deviations from a mean sum to 0.
        freedom = float(len(changes) - 1)
        square = 0.5 * sum(change * change for change in changes) / freedom if freedom > 0.0 else 0.0
    if freedom <= 0.0:
        return
    square = min(square, LARGEST)
    if scale["pairs"] >= KNOWN_PAIRS and scale["variance"] > 0.0:
        square = min(square, MAX_VARIANCES * scale["variance"])
    scale["pairs"] += 1
    scale["freedom"] += freedom
    scale["variance"] += (square - scale["variance"]) / min(scale["pairs"], MEMORY)


@dataclass(frozen=True)
class Model:
    """The noise that is assumed.

    Attributes:
        length: points from which on the means of successive blocks are (nearly) uncorrelated; if no length
            is known to do, the longest that has enough blocks.
        white: the noise of blocks of that length; None if no length will do.
        longer: the noise of all blocks, without what the tolerance covers.
        whole: what it would be of a block as long as the run, if it went on to grow with the length as it
            does at all lengths that are known well; None if at one of them it does not.
    """

    length: int
    white: Scale | None
    longer: tuple[Scale, ...]
    whole: Scale | None


def model(scales: Sequence[Scale], covered: Callable[[int], float], least: int, count: int) -> Model | None:
    """The shortest blocks, of at least `least` points, from which on the noise falls as white noise does.

    Few long blocks that vary little do not show that: it must have stopped growing before.

    Args:
        scales: the result of `scales`.
        covered: the variance, by length, of lasting differences that the tolerance covers.
        count: points of the run.
    """
    usable = [scale for scale in scales if scale.length >= least]
    if not usable:
        return None
    longer = tuple(
        Scale(scale.length, max(scale.variance - covered(scale.length), 0.0), scale.freedom)
        for scale in scales
    )
    grows = [later.variance > scale.variance for scale, later in itertools.pairwise(scales)]
    skipped = len(scales) - len(usable)
    for i, scale in enumerate(usable):
        grew = grows[skipped + i - 1] if skipped + i else False
        if scale.freedom >= ENOUGH_FREEDOM and not grew and _is_white(scale, usable[i + 1 :], covered):
            return Model(scale.length, scale, longer, None)
    enough = [scale for scale in usable if scale.freedom >= ENOUGH_FREEDOM] or usable[:1]
    last = skipped + len(enough)
    whole = _whole(scales[:last], covered, count) if all(grows[: last - 1]) else None
    return Model(enough[-1].length, None, longer, whole)


def _whole(well_known: Sequence[Scale], covered: Callable[[int], float], count: int) -> Scale:
    """The noise of a block as long as the run, from the growth over the last two doublings of the length."""
    *_, last = latest = well_known[-3:]
    growth = last.variance / latest[0].variance if latest[0].variance > 0.0 else 1.0
    doubling = min(growth ** (1.0 / max(len(latest) - 1, 1)), MAX_GROWTH)
    doublings = math.log2(max(count / last.length, 1.0))
    variance = last.variance * doubling**doublings - covered(last.length)
    return Scale(count, max(variance, 0.0), last.freedom)


def walk(state: State, scales: Sequence[Scale]) -> float:
    """The standard deviation of a random walk over all points, as far as the noise is one.

    The Allan variance of a walk with steps of variance s is s L / 3 at length L, and white noise adds that of
    single points over L. So each length gives an estimate of s, and the least one counts: noise that lasts
    for a while only looks like a walk at the lengths that it lasts for. A walk also falls far, so the largest
    fall of means of 64 points bounds it: a rise does not.
    """
    steps = [
        3.0 * (scale.variance - scales[0].variance / scale.length) / scale.length
        for scale in scales
        if scale.length >= WALK_LENGTH
    ]
    deviation = math.sqrt(max(min(steps, default=0.0), 0.0) * state["count"])
    return float(min(deviation, max(state["fall"], state["before"][0])))


def white_deviation(scales: Sequence[Scale]) -> float:
    """The standard deviation that means of 64 points had if the noise of single points were white."""
    return math.sqrt(scales[0].variance / 2**WANDER_LEVEL)


def _is_white(short: Scale, longer: Sequence[Scale], covered: Callable[[int], float]) -> bool:
    """Return whether longer blocks, each and all together, vary as little as if points were independent."""
    ratios = [
        other.variance / (short.variance * short.length / other.length + covered(other.length))
        for other in longer
    ]
    freedoms = [other.freedom for other in longer]
    own = math.sqrt(2.0 / short.freedom)
    if any(
        ratio > 1.0 + own + math.sqrt(2.0 / freedom) for ratio, freedom in zip(ratios, freedoms, strict=True)
    ):
        return False
    together = sum(freedoms)
    mean = sum(ratio * freedom for ratio, freedom in zip(ratios, freedoms, strict=True)) / max(together, 1.0)
    return mean <= 1.0 + own
