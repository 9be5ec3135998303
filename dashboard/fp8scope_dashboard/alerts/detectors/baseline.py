"""A loss above its baseline, with a bound on false alarms over the whole run.

The relative difference d_t = (loss_t - b_t) / abs(b_t) to the mean b_t of the baseline's seeds is averaged
over blocks: D_1, D_2, ... Two e-processes bet on the blocks that are above the tolerance (`e_process`).

* **Tolerance**: twice the margin, or what a seed of the same configuration may differ by (`seed_tolerance`)
  if that is more. It depends on the seeds, not on the run.
* **Blocks** are as long as their means need to be uncorrelated (`block_length`). The length is chosen from
  the past, when the number of points doubles. Where no length will do, the tolerance is at least LASTING
  standard deviations of the noise that outlasts a block: then only larger rises are found.
* **Deviation** of a block's mean, for the magnitude process: from the differences of successive blocks, which
  a lasting rise does not enlarge, averaged exponentially.

**Hypothesis.** H0: given the past, the median of D_j is at most the tolerance (sign process), or its mean is,
with a deviation of at most the predicted one (magnitude process). Each process has half of alpha. After a
resolved alarm a new pair starts; the i-th pair alarms at 1/a_i with a_i = alpha 2^-i, so by the union bound
all pairs of a run together alarm falsely with probability at most alpha.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import block_length, e_process, seed_tolerance
from fp8scope_dashboard.alerts.detectors.base import Finding, State, finite, in_words, percent
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

Floats = NDArray[np.float64]
Parameters = Mapping[str, float]

# The smallest tolerance, in margins. A verdict judges the end of a run; in its course, runs of one
# configuration part further, and come together again.
MARGINS = 2.0
# Standard deviations of noise that outlasts the blocks which the limit is at least, the share by which noise
# seen in so many independent blocks may be larger, and the number of standard deviations of a tolerance.
LASTING, FEW, TOLERANCE_DEVIATIONS = 6.0, 12.0, 3.5
# Factor of the predicted variance: it is estimated, from few blocks at first.
SAFETY = 1.5
# Blocks over which the variance is averaged, and the most a new block counts, in predicted variances.
MEMORY, MOST_VARIANCES = 32.0, 9.0
# Evidence from which on a rise counts as under way.
IN_PROGRESS = 5.0
# The smallest deviation of a block's mean, relative to the margin: curves that agree in all digits have none.
FLOOR = 0.1


def above_baseline(
    state: State,
    steps: NDArray[np.int64],
    losses: Floats,
    baselines: Floats,
    parameters: Parameters,
) -> tuple[State, list[Finding]]:
    """Open when the evidence that the run is above its baseline reaches its limit; close after `recover`
    blocks within the tolerance.

    Args:
        steps: int64[n], ascending and above all earlier steps; others are ignored.
        losses: float64[n]; NaN and infinities count as above.
        baselines: float64[K, n], one row per baseline seed, NaN where it has no finite value. Steps at which
            no seed has one are ignored.
        parameters: `margin` (relative), `alpha`, `block` (least points), `recover` (blocks).

    As long as the seeds are the same, the result does not depend on the division of the points into batches.
    """
    state = {**_fresh(parameters), **copy.deepcopy(state)}
    findings = []
    for step, loss, seeds in zip(steps.tolist(), losses.tolist(), baselines.T.tolist(), strict=True):
        if state["last_step"] is not None and step <= state["last_step"]:
            continue
        state["last_step"] = step
        known = [finite(seed) for seed in seeds]
        present = [seed for seed in known if seed is not None]
        if not present:
            continue
        mean = sum(present) / len(present)
        state["seeds"] = max(state["seeds"], len(present))
        _learn(state, known, mean, parameters)
        delta = _relative(loss, mean)
        if abs(delta) <= LARGEST and not state["open"]:
            state["choose"] |= block_length.add(state["noise"], delta)
        # A rise looks like noise that lasts: while there is evidence of one, the blocks stay as they are.
        if state["choose"] and e_process.wealth(state["evidence"]) < IN_PROGRESS:
            _choose_blocks(state, parameters)
        finding = _add_point(state, step, delta, mean, parameters)
        if finding:
            findings.append(finding)
    return state, findings


def restarted(state: State, step: int) -> State:
    """The state from which the steps from `step` on are judged once more, because they were trained again.

    The evidence stays valid, because H0 says the same of each new loss. Only a condition, or a suspicion,
    that began in the steps that were replaced ends: another process begins, with its own share of alpha.
    """
    after: State = {**state, "last_step": step - 1, "block": _empty_block()}
    if state["open"] or (state["onset"] is not None and state["onset"] >= step):
        after.update(_fresh_evidence(), open=False, calm=0, processes=state["processes"] + 1)
    return after


def _fresh(parameters: Parameters) -> State:
    return {
        "last_step": None,
        "seeds": 0,
        "seed_spread": seed_tolerance.fresh(),
        "tolerance": MARGINS * parameters["margin"],
        "noise": block_length.fresh(),
        # Points of a block, None until it is chosen, and what is known of the noise of such blocks.
        "choose": False,
        "length": None,
        "variance": 0.0,
        "correlation": 0.0,
        "lasting": 0.0,
        "independent": 1.0,
        "block": _empty_block(),
        "previous": None,
        "open": False,
        "processes": 0,
        "calm": 0,
        **_fresh_evidence(),
    }


def _fresh_evidence() -> State:
    return {"evidence": e_process.fresh(), "cusum": 0.0, "onset": None}


def _empty_block() -> State:
    return {"points": 0, "sum": 0.0, "level": 0.0, "first": None, "finite": True}


def _relative(loss: float, reference: float) -> float:
    """The relative difference; infinite, with the sign of the difference, if the reference is (nearly) 0, and
    for a loss that is not finite.
    """
    if finite(loss) is None:
        return math.inf
    if abs(reference) >= SMALLEST:
        return (loss - reference) / abs(reference)
    return 0.0 if loss == reference else math.copysign(math.inf, loss - reference)


def _learn(state: State, seeds: Sequence[float | None], mean: float, parameters: Parameters) -> None:
    if seed_tolerance.add(state["seed_spread"], seeds, mean):
        allowed = seed_tolerance.tolerance(state["seed_spread"], state["seeds"], parameters["alpha"])
        state["tolerance"] = max(MARGINS * parameters["margin"], allowed)


def _choose_blocks(state: State, parameters: Parameters) -> None:
    state["choose"] = False
    blocks = block_length.choose(state["noise"], int(parameters["block"]))
    if blocks is None:
        return
    state.update(
        length=blocks.length,
        variance=blocks.variance,
        correlation=blocks.correlation,
        lasting=blocks.lasting,
        independent=blocks.independent,
        previous=None,
    )


def _add_point(state: State, step: int, delta: float, mean: float, parameters: Parameters) -> Finding | None:
    """Add a point to the block, and judge the block when it is full."""
    block = state["block"]
    if block["first"] is None:
        block["first"] = step
    block["points"] += 1
    block["level"] += mean
    if abs(delta) <= LARGEST:
        block["sum"] += delta
    else:
        block["finite"] = False
    if block["points"] < (state["length"] or parameters["block"]):
        return None
    state["block"] = _empty_block()
    if state["length"] is None:
        return None
    return _judge(state, block, step, parameters)


def _judge(state: State, block: State, step: int, parameters: Parameters) -> Finding | None:
    delta = block["sum"] / block["points"] if block["finite"] else math.inf
    limit = _limit(state)
    above = delta > limit
    if state["open"]:
        return _while_open(state, above, step, parameters)
    floor = max(FLOOR * parameters["margin"], SMALLEST) ** 2
    # Successive blocks that are correlated make their sum vary more.
    variance = SAFETY * (1.0 + 2.0 * state["correlation"]) * max(state["variance"], floor)
    e_process.bet(state["evidence"], above, (delta - limit) / math.sqrt(variance))
    _learn_variance(state, delta, floor)
    # The most likely start of the change is where the sum of signs was last at its minimum.
    state["cusum"] = max(state["cusum"], 0.0) + (1.0 if above else -1.0)
    if state["cusum"] == 1.0:
        state["onset"] = block["first"]
    budget = parameters["alpha"] * 2.0 ** -(state["processes"] + 1)
    if not above or e_process.wealth(state["evidence"]) * budget < 1.0:
        return None
    state.update(open=True, calm=0)
    return _opened(state, step, delta, limit, block["level"] / block["points"])


def _limit(state: State) -> float:
    """The tolerance, or more if noise outlasts the blocks by more than seeds explain."""
    tolerance = float(state["tolerance"])
    excess = float(state["lasting"]) ** 2 - (tolerance / TOLERANCE_DEVIATIONS) ** 2
    if excess <= 0.0:
        return tolerance
    return max(tolerance, LASTING * math.sqrt(excess) * (1.0 + FEW / float(state["independent"])))


def _learn_variance(state: State, delta: float, floor: float) -> None:
    if not math.isfinite(delta):
        return
    if state["previous"] is not None:
        square = 0.5 * (delta - state["previous"]) ** 2 / (1.0 - min(state["correlation"], 0.5))
        square = min(square, MOST_VARIANCES * max(state["variance"], floor))
        state["variance"] += (square - state["variance"]) / MEMORY
    state["previous"] = delta


def _while_open(state: State, above: bool, step: int, parameters: Parameters) -> Finding | None:
    state["calm"] = 0 if above else state["calm"] + 1
    if state["calm"] < parameters["recover"]:
        return None
    onset = state["onset"]
    state.update(_fresh_evidence(), open=False, processes=state["processes"] + 1)
    return Finding(False, onset, step)


def _opened(state: State, step: int, delta: float, limit: float, reference: float) -> Finding:
    onset = state["onset"]
    since = f"Loss is above its baseline since about step {onset}"
    if math.isinf(delta):
        message = f"{since}: it is not finite at step {step}, where the baseline's is {in_words(reference)}."
    else:
        message = (
            f"{since}: {percent(delta)} over {in_words(reference)} at step {step}, "
            f"above the limit of {percent(limit)}."
        )
    evidence = {
        "e_value": e_process.wealth(state["evidence"]),
        "blocks": state["evidence"]["blocks"],
        "block_points": state["length"],
        "baseline": reference,
        "seeds": state["seeds"],
    }
    return Finding(True, onset, step, finite(delta), limit, message, evidence)
