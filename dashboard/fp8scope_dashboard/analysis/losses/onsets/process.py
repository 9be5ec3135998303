"""The onset of a harm: a loss above its baseline, with a bound on false alarms over the whole run.

The alert `above_baseline` and the verdict *worse* of a run that became worse are both this test, so they have
one onset and one limit. What follows an onset is judged by the noise before it. The change point is part of
the budget: every window of every length has its own share of alpha.

The relative difference d_t = (loss_t - b_t) / abs(b_t) to the mean b_t of the baseline's seeds is compared
with a tolerance, in two ways that share alpha equally:

* *Means* (`window_means`): the mean of the latest 16, 32, 64, ... points against the tolerance and the noise
  of such a mean. It is quick if the rise is large beside the noise.
* *Signs* (`e_process`): an e-process bets on blocks of points whose mean is above the tolerance. It needs no
  variance.

Both rest on

* the **tolerance**: twice the margin, or what a seed of the same configuration may differ by
  (`seed_tolerance`) if that is more. It depends on the seeds, not on the run.
* the **noise** (`noise`): how block means vary, by the length of the blocks, from what has come before. A
  rise of the run does not count as noise. The blocks are as long as their means need to be uncorrelated.

A rise that these find must also be more than the seeds' lasting wandering explains (`wandering`).

After a resolved alarm new processes start. The i-th ones have SHARE alpha 2^-i, so by the union bound all of
a run together alarm falsely with probability at most SHARE alpha. The rest of alpha is for the confidence
sequence of a verdict.

Points that are not finite are another rule's matter (`loss_not_finite`). They count only if they last: then
the run is above its baseline whatever it was before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.losses.onsets import (
    e_process,
    noise,
    seed_tolerance,
    short_runs,
    wandering,
    window_means,
)
from fp8scope_dashboard.analysis.losses.onsets.base import State, finite
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

Parameters = Mapping[str, float]

# The smallest tolerance, in margins. A verdict judges the end of a run; in its course, runs of one
# configuration part further, and come together again.
MARGINS = 2.0
# A rise that no wandering explains must be so many times as high as a lasting offset may be.
SURE_LIMIT = 1.5
# Noise that lasts is covered by the tolerance up to a standard deviation of the tolerance over DEVIATIONS.
# That is less while few points show how much the run varies: by FEW over the number of points.
DEVIATIONS, FEW = 4.6, 1000.0
# Share of the tolerance by which means of healthy runs wander, how many of their standard deviations means of
# white noise do, and how much any further wander widens the tolerance. With one seed only the run shows it.
WANDER_COVERED, WHITE_WANDER, WANDER_FACTOR = 0.7, 4.0, 1.6
# The run may wander away from a single seed as a random walk does. The tolerance allows for so many of its
# deviations.
WALK_DEVIATIONS = 2.5
# Points from which on a run is judged, and after which the noise is modelled again.
FIRST_POINTS, MODEL_EVERY = 64, 32
# With fewer points too little is known of the noise: the tolerance is wider by the square of their ratio, and
# with one seed and fewer than KNOWN_ALONE points by its fifth power, so that only gross differences count.
ALL_POINTS, ALL_POINTS_ALONE, KNOWN_ALONE = 256, 512, 192
# The share of alpha that this test has; see `analysis.losses.sequence`.
SHARE = 0.25
# So many points in a row that are not finite count as above.
NOT_FINITE_POINTS = window_means.BLOCKS


@dataclass(frozen=True, kw_only=True)
class Change:
    """The start (`opened`) or the end of a stretch above the baseline.

    Attributes:
        onset: the first step of the stretch, as far as it can be told.
        step: at which it was decided.
        points, mean: since the onset, the number of points and their mean relative difference; infinite if
            the loss is not finite.
        window, window_mean, limit: the points of the window that decided, the mean of its (clipped) points,
            and what that is above. `limit` is None if the loss is not finite.
        tolerance: the difference that seeds of one configuration may have.
        baseline: the mean of the baseline's losses at `step`.
        e_value, blocks, block_points: the evidence of the signs, the number of blocks that it is from, and
            their points.
    """

    opened: bool
    onset: int
    step: int
    points: int = 0
    mean: float = 0.0
    window: int = 0
    window_mean: float = 0.0
    limit: float | None = None
    tolerance: float = 0.0
    baseline: float = 0.0
    e_value: float = 0.0
    blocks: int = 0
    block_points: int = 0


def advance(
    state: State,
    steps: NDArray[np.int64],
    losses: Floats,
    baselines: Floats,
    parameters: Parameters,
) -> tuple[State, list[Change]]:
    """Open when the evidence that the run is above its baseline reaches its limit; close after `recover`
    blocks within the tolerance.

    Args:
        steps: int64[n], ascending and above all earlier steps; others are ignored.
        losses: float64[n], of one run, or means of `runs` seeds. NaN and infinities count as above if they
            last.
        baselines: float64[K, n], one row per baseline seed, NaN where it has no finite value. Steps at which
            no seed has one are ignored.
        parameters: `margin` (relative), `alpha`, `block` (least points), `recover` (blocks); and, with the
            values of one run in a project without seeds if they are missing, `runs` (seeds that `losses` is
            the mean of) and `spread` (prior spread between seeds).

    As long as the seeds are the same, the result does not depend on the division of the points into batches.
    """
    state = {**_fresh(parameters), **copy.deepcopy(state)}
    changes = []
    for step, loss, seeds in zip(steps.tolist(), losses.tolist(), baselines.T.tolist(), strict=True):
        if state["last_step"] is not None and step <= state["last_step"]:
            continue
        state["last_step"] = step
        finite_seeds = [finite(seed) for seed in seeds]
        present = [seed for seed in finite_seeds if seed is not None]
        if not present:
            continue
        mean = sum(present) / len(present)
        state["seeds"] = max(state["seeds"], len(present))
        _learn(state, finite_seeds, mean, parameters)
        delta = _relative(loss, mean)
        if math.isinf(delta):
            state["not_finite"] = state.get("not_finite", 0) + 1
            if state["not_finite"] == 1:
                state["broken_since"] = step
            if not state["open"] and state["not_finite"] >= NOT_FINITE_POINTS:
                changes.append(_broken(state, step, mean))
            continue
        state["not_finite"] = 0
        if delta == 0.0 and not state["noise"]["count"]:
            # Both are bitwise equal before FP8 begins: that shows no noise, and is no evidence.
            state["equal"] += 1
            continue
        if not state["open"]:
            deviations = [_deviation(seed, mean) for seed in finite_seeds]
            clipped = noise.add(state["noise"], delta, deviations)
            wandering.add(state["wandering"], step, clipped, deviations)
            if state["noise"]["count"] < FIRST_POINTS:
                state["first"] = [*state["first"], [step, delta]]
            # Outliers below the others must not hide a rise.
            delta = max(delta, clipped)
            count = state["noise"]["count"]
            if count >= FIRST_POINTS and count % MODEL_EVERY == 0:
                _model_noise(state, parameters)
        change = _add_point(state, step, delta, mean, parameters)
        if change:
            changes.append(change)
    return state, changes


def restarted(state: State, step: int) -> State:
    """The state from which the steps from `step` on are judged once more, because they were trained again.

    The evidence stays valid, because H0 says the same of each new loss. Only a condition, or a suspicion,
    that began in the steps that were replaced ends: another process begins, with its own share of alpha.
    """
    after: State = {**state, "last_step": step - 1, "block": _empty_block()}
    after["noise"] = noise.interrupted(state["noise"])
    after["wandering"] = wandering.restarted(state.get("wandering", wandering.fresh()), step)
    after["first"] = [point for point in state.get("first", []) if point[0] < step]
    after["means"] = {**window_means.fresh(), "limits": state["means"]["limits"]}
    if state["open"] or (state["onset"] is not None and state["onset"] >= step):
        after.update(_fresh_evidence(), means=after["means"], open=False, calm=0)
        after["processes"] = state["processes"] + 1
    return after


def _least(parameters: Parameters) -> float:
    """The smallest tolerance, before the seeds of the run's own arm narrow it."""
    return MARGINS * parameters["margin"]


def _narrowed(state: State, parameters: Parameters) -> float:
    """By what factor the mean of several seeds varies less than one run from the same baseline."""
    runs, seeds = parameters.get("runs", 1.0), max(state["seeds"], 1)
    return math.sqrt((1.0 / runs + 1.0 / seeds) / (1.0 + 1.0 / seeds))


def _fresh(parameters: Parameters) -> State:
    return {
        "last_step": None,
        "seeds": 0,
        "seed_spread": seed_tolerance.fresh(),
        "tolerance": _least(parameters),
        # What of the noise is such an offset: the long blocks remember the early points.
        "covered": _least(parameters),
        "noise": noise.fresh(),
        "wandering": wandering.fresh(),
        # The steps and differences of the points before FIRST_POINTS.
        "first": [],
        # Points at the beginning at which run and baseline are bitwise equal.
        "equal": 0,
        # Points of a block, None until they are known, and what the mean of a block is compared with.
        "length": None,
        "limit": None,
        "block": _empty_block(),
        # By what factor the tolerance is wider while few points are known.
        "caution": 1.0,
        "open": False,
        "not_finite": 0,
        "processes": 0,
        "calm": 0,
        **_fresh_evidence(),
    }


def _fresh_evidence() -> State:
    return {"evidence": e_process.fresh(), "means": window_means.fresh(), **_unsuspected()}


def _unsuspected() -> State:
    """The most likely start of a change, and the number and the sum of the points since then."""
    return {"cusum": 0.0, "onset": None, "since": _empty_block()}


def _empty_block() -> list[float]:
    """The number of points of a block, and their sum."""
    return [0, 0.0]


def _deviation(seed: float | None, mean: float) -> float | None:
    """The relative difference of a seed to the mean of all, finite; None if it is unknown."""
    if seed is None or abs(mean) < SMALLEST:
        return None
    return min(max((seed - mean) / abs(mean), -LARGEST), LARGEST)


def _relative(loss: float, reference: float) -> float:
    """The relative difference, at most LARGEST; infinite for a loss that is not finite, and LARGEST with the
    sign of the difference if the reference is (nearly) 0.
    """
    if finite(loss) is None:
        return math.inf
    if abs(reference) >= SMALLEST:
        return min(max((loss - reference) / abs(reference), -LARGEST), LARGEST)
    return 0.0 if loss == reference else math.copysign(LARGEST, loss - reference)


def _learn(state: State, seeds: Sequence[float | None], mean: float, parameters: Parameters) -> None:
    if seed_tolerance.add(state["seed_spread"], seeds, mean):
        spread, alpha = state["seed_spread"], parameters["alpha"]
        prior = parameters.get("spread", PUBLIC.spread)
        allowed, covered = (
            seed_tolerance.tolerance(spread, state["seeds"], alpha, prior=prior, early=early)
            for early in (False, True)
        )
        least, factor = _least(parameters), _narrowed(state, parameters)
        # One margin is what counts as none, however many seeds there are.
        tolerance = max(factor * max(least, allowed), parameters["margin"])
        state.update(tolerance=tolerance, covered=max(factor * max(least, covered), parameters["margin"]))


def _model_noise(state: State, parameters: Parameters) -> None:
    """Update the limits of the windows, and the length and limit of the blocks."""
    runs = parameters.get("runs", 1.0)
    scales = noise.scales(state["noise"], state["seeds"], runs)
    model = noise.model(
        scales, _covered(state, parameters), int(parameters["block"]), state["noise"]["count"]
    )
    if model is None:
        return
    alone = state["seeds"] < 2
    expected = WANDER_COVERED * state["tolerance"] + WHITE_WANDER * noise.white_deviation(scales)
    # Several seeds show how far they wander (`wandering`).
    beyond = noise.wander(state["noise"]) - expected if alone else 0.0
    count = state["noise"]["count"]
    # Runs that were equal for long have no offset of seeds to begin with.
    unlike = alone and state["equal"] < FIRST_POINTS
    caution = _caution(count, alone=alone, unlike=unlike, lasting=model.white is None)
    state["caution"] = caution
    tolerance = caution * state["tolerance"] + WANDER_FACTOR * max(beyond, 0.0)
    budget = 0.5 * _budget(state, parameters)
    at_once = window_means.lasting(tolerance) + noise.reach(state["noise"])
    if alone:
        tolerance = math.hypot(tolerance, WALK_DEVIATIONS * noise.walk(state["noise"], scales))
    limits = [min(limit, at_once) for limit in window_means.limits(model, tolerance, count, budget)]
    state["means"]["limits"] = limits
    if state["open"]:
        return
    window = max(model.length.bit_length() - window_means.BLOCKS.bit_length(), 0)
    # The signs of blocks that are correlated say nothing about a limit that their noise reaches.
    lasting = limits[min(window, len(limits) - 1)]
    state.update(
        length=model.length, limit=lasting if model.white is None else window_means.lasting(tolerance)
    )


def _caution(count: int, *, alone: bool, unlike: bool, lasting: bool) -> float:
    """By what factor the tolerance is wider because few points show how the noise is.

    With one seed, noise that outlasts the known blocks takes more points to show itself. So does, at first,
    the offset of runs that are `unlike` from the beginning.
    """
    if unlike and count < KNOWN_ALONE:
        return max(ALL_POINTS / count, 1.0) ** 5
    enough = ALL_POINTS_ALONE if alone and lasting else ALL_POINTS
    return max(enough / count, 1.0) ** 2


def _covered(state: State, parameters: Parameters) -> Callable[[int], float]:
    """By the length of blocks, the variance of lasting differences that the tolerance covers.

    A tolerance that is wider because the loss falls fast is for seeds that are ahead or behind: such offsets
    hardly change within short blocks.
    """
    count = state["noise"]["count"]
    usual = min(state["covered"], seed_tolerance.usual(parameters["alpha"]))
    wider = state["covered"] - usual
    deviation = (usual + 0.5 * wider) / (DEVIATIONS + FEW / count)
    return lambda length: float(deviation**2 + (wider * length / count) ** 2)


def _budget(state: State, parameters: Parameters) -> float:
    return float(SHARE * parameters["alpha"] * 2.0 ** -(state["processes"] + 1))


def _add_point(state: State, step: int, delta: float, mean: float, parameters: Parameters) -> Change | None:
    if state["open"]:
        return _while_open(state, step, delta, parameters)
    # The most likely start of the change is where the sum of signs was last at its minimum.
    if state["cusum"] <= 0.0:
        state.update(onset=step, since=_empty_block())
    state["since"] = [state["since"][0] + 1, min(state["since"][1] + delta, LARGEST)]
    state["cusum"] = max(state["cusum"] + (1.0 if delta > state["tolerance"] else -1.0), 0.0)
    above = window_means.add(state["means"], delta)
    block = _block_mean(state, delta)
    if block is not None:
        e_process.bet(state["evidence"], block > state["limit"])
    points, total = state["since"]
    if above is not None:
        limit, window, window_mean = above.limit, above.points, above.mean
    # An alarm that signs decide must not say of itself that the mean is within the limit.
    elif block is not None and _signs_decide(state, parameters) and total / points > state["limit"]:
        limit, window, window_mean = state["limit"], points, total / points
    else:
        return _sure(state, step, mean, parameters) or _gross(state, step, mean, parameters)
    runs = parameters.get("runs", 1.0)
    spread = parameters.get("spread", PUBLIC.spread)
    if wandering.explains(state["wandering"], window, runs, state["seeds"], spread):
        return None
    return _opened(state, step, mean, window, window_mean, limit)


def _sure(state: State, step: int, mean: float, parameters: Parameters) -> Change | None:
    """Open for a rise that no wandering since its onset explains, whatever the noise was before that."""
    runs, spread = parameters.get("runs", 1.0), parameters.get("spread", PUBLIC.spread)
    limit = SURE_LIMIT * window_means.lasting(state["caution"] * state["tolerance"])
    rise = wandering.sure_rise(state["wandering"], limit, runs, state["seeds"], spread)
    if rise is None:
        return None
    state["means"]["limits"] = [min(bound, limit) for bound in state["means"]["limits"]]
    return _opened(state, step, mean, *rise, limit)


def _gross(state: State, step: int, mean: float, parameters: Parameters) -> Change | None:
    """Open for a gross rise of a run that has few points."""
    if state["noise"]["count"] >= FIRST_POINTS:
        return None
    limit = max(short_runs.LIMIT, MARGINS * parameters["margin"])
    rise = short_runs.rise(state["first"], limit, parameters["alpha"])
    if rise is None:
        return None
    state.update(length=state["length"] or short_runs.POINTS, onset=rise.onset)
    state["since"] = [rise.points, rise.points * rise.mean]
    return _opened(state, step, mean, rise.points, rise.mean, limit)


def _opened(state: State, step: int, mean: float, window: int, window_mean: float, limit: float) -> Change:
    points, total = state["since"]
    state.update(open=True, calm=0, block=_empty_block(), limit=limit)
    return Change(
        opened=True,
        onset=state["onset"],
        step=step,
        points=points,
        mean=total / points,
        window=window,
        window_mean=window_mean,
        limit=limit,
        tolerance=state["tolerance"],
        baseline=mean,
        **_evidence(state),
    )


def _evidence(state: State) -> dict[str, Any]:
    evidence = state["evidence"]
    return {
        "e_value": e_process.wealth(evidence),
        "blocks": evidence["blocks"],
        "block_points": state["length"] or 0,
    }


def _signs_decide(state: State, parameters: Parameters) -> bool:
    return e_process.wealth(state["evidence"]) * 0.5 * _budget(state, parameters) >= 1.0


def _block_mean(state: State, delta: float) -> float | None:
    """Add a point to the block; return the block's mean when it is full."""
    points, total = state["block"][0] + 1, state["block"][1] + delta
    if points < (state["length"] or math.inf):
        state["block"] = [points, min(max(total, -LARGEST), LARGEST)]
        return None
    state["block"] = _empty_block()
    return float(total / points)


def _broken(state: State, step: int, mean: float) -> Change:
    """Open for a loss that is lastingly not finite."""
    state.update(open=True, calm=0, block=_empty_block(), onset=state["broken_since"])
    # A run may break before there is a limit.
    state["limit"] = state["limit"] or window_means.lasting(state["tolerance"])
    state["length"] = state["length"] or NOT_FINITE_POINTS
    points = state["not_finite"]
    return Change(
        opened=True,
        onset=state["onset"],
        step=step,
        points=points,
        mean=math.inf,
        window=points,
        window_mean=math.inf,
        tolerance=state["tolerance"],
        baseline=mean,
        **_evidence(state),
    )


def _while_open(state: State, step: int, delta: float, parameters: Parameters) -> Change | None:
    block = _block_mean(state, delta)
    if block is None:
        return None
    state["calm"] = 0 if block > state["limit"] else state["calm"] + 1
    if state["calm"] < parameters["recover"]:
        return None
    onset = state["onset"]
    state.update(_fresh_evidence(), open=False, processes=state["processes"] + 1)
    state["noise"] = noise.interrupted(state["noise"])
    return Change(opened=False, onset=onset, step=step)
