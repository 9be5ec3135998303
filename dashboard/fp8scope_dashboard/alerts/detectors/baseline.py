r"""A sign e-process for a loss above its baseline, with a bound on false alarms over the whole run.

**Data.** The relative difference d_t = (loss_t - b_t) / abs(b_t) to the mean b_t of the baseline's seeds at
the same step is averaged over blocks of `block` points: D_1, D_2, ... Each block has a margin m_j that does
not depend on the run (below). Only the sign xi_j = +1 if D_j > m_j else -1 is used, so heavy tails do no
harm.

**Hypothesis.** H0: the median of D_j given the blocks before it is at most m_j, P(xi_j = +1 | past) <= 1/2.

**E-process.** For a bet L in (0, 1) the factor 1 + L xi_j is >= 0 and has conditional mean at most 1 under
H0. So the product of the factors from block k on is a non-negative supermartingale that starts at 1. The
change may come at any k, and the best L depends on how often blocks are above, so we hold a portfolio. A
capital of 1 is split over starting blocks by w_k = 1 / (k (k + 1)), which sum to 1, and equally over the
bets in BETS. Each share is idle until its block. With A_j(L) = (A_{j-1}(L) + w_j) (1 + L xi_j) the wealth is

    M_j = mean over L of A_j(L)  +  1 / (j + 1)            (the idle shares: the sum of w_k over k > j)

**Guarantee.** Under H0, M is a convex combination of non-negative supermartingales that start at 1, so it is
one itself with M_0 = 1. Ville's inequality gives P(exists j: M_j >= 1/a) <= a over the *whole* run,
regardless of its length and of when it is stopped. (The plain e-Shiryaev-Roberts statistic, the same
recursion with w_j = 1, has E[R_j] <= j and controls the average run length to a false alarm, not its
probability. Weights that sum to 1 make it an e-process, at the price of ln k(k+1) in the delay.) After a
resolved alarm a new process starts. The i-th process alarms at 1/a_i with a_i = alpha 2^-i, so by the union
bound all processes of a run together give *any* false alarm with probability at most alpha.

**Margin.** H0 is false for equal configurations too, because two seeds differ by a persistent offset. Hence
m_j is max(margin, 3 s_j sqrt(1 + 1/K)). s_j is the relative SD
between the block means of K >= 3 seeds; its square is averaged exponentially over blocks up to j, because
the SD of three seeds in one block is a poor estimate. With fewer seeds m_j is the margin, or uses the last
s_j if there were three seeds before.

Sources: Ville (1939); Shin, Ramdas and Rinaldo, "E-detectors" (2024), for e-SR and mixtures over bets;
docs/statistics.md has the simulation of the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import Finding, State, finite, in_words, percent
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

Floats = NDArray[np.float64]
Parameters = Mapping[str, float]

BETS = (0.2, 0.4, 0.6, 0.8, 0.95)
# With at least so many baseline seeds their spread, times the factor, widens the margin.
SEEDS_FOR_SPREAD = 3
SPREAD_FACTOR = 3.0
# Weight of a new block in the average of the squared spread between seeds.
SPREAD_WEIGHT = 0.05


def above_baseline(
    state: State,
    steps: NDArray[np.int64],
    losses: Floats,
    baselines: Floats,
    parameters: Parameters,
) -> tuple[State, list[Finding]]:
    """Open when the e-process finds the run above its baseline; close after `recover` blocks within the
    margin.

    Args:
        steps: int64[n], ascending and above all earlier steps; others are ignored.
        losses: float64[n]; NaN and infinities count as above.
        baselines: float64[K, n], one row per baseline seed, NaN where it has no finite value. Steps at which
            no seed has one are ignored.
        parameters: `margin` (relative), `alpha`, `block` (points), `recover` (blocks).

    As long as the seeds are the same, the result does not depend on the division of the points into batches.
    """
    state = {**_fresh(), "last_step": None, "processes": 0, "spread": None, "open": False, **state}
    findings = []
    for step, loss, seeds in zip(steps.tolist(), losses.tolist(), baselines.T.tolist(), strict=True):
        if state["last_step"] is not None and step <= state["last_step"]:
            continue
        state["last_step"] = step
        # The state is JSON: NaN and infinities, which all count as above, are stored as None.
        known = [finite(seed) for seed in seeds]
        if not any(seed is not None for seed in known):
            continue
        state["points"] = [*state["points"], [step, finite(loss), known]]
        if len(state["points"]) >= parameters["block"]:
            finding = _judge_block(state, parameters)
            if finding:
                findings.append(finding)
    return state, findings


def restarted(state: State, step: int) -> State:
    """The state from which the steps from `step` on are judged once more, because they were trained again.

    The evidence stays valid, because H0 says the same of each new loss. Only a condition, or a suspicion,
    that began in the steps that were replaced ends: another process begins, with its own share of alpha.
    """
    after: State = {**state, "last_step": step - 1}
    after["points"] = [point for point in state["points"] if point[0] < step]
    if state["open"] or (state["onset"] is not None and state["onset"] >= step):
        after.update(_fresh(), open=False, processes=state["processes"] + 1)
    return after


def _fresh() -> State:
    return {"points": [], "blocks": 0, "wealth": [0.0] * len(BETS), "cusum": 0.0, "onset": None, "calm": 0}


def _judge_block(state: State, parameters: Parameters) -> Finding | None:
    """Judge a full block. In plain numbers: arrays of this size would take ten times as long."""
    points, state["points"] = state["points"], []
    first, last = points[0][0], points[-1][0]
    references = [_mean([seed for seed in seeds if seed is not None]) for _, _, seeds in points]
    losses = [math.inf if loss is None else loss for _, loss, _ in points]
    _learn_spread(state, [seeds for _, _, seeds in points])
    margin = max(parameters["margin"], _seed_tolerance(state))
    delta = _mean([_relative(loss, reference) for loss, reference in zip(losses, references, strict=True)])
    above = delta > margin
    if state["open"]:
        return _while_open(state, above, last, parameters)
    _bet(state, 1.0 if above else -1.0, first)
    if wealth(state) * parameters["alpha"] * 2.0 ** -(state["processes"] + 1) < 1.0:
        return None
    state.update(open=True, calm=0)
    return _opened(state, last, delta, margin, _mean(references), len(points[-1][2]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _relative(loss: float, reference: float) -> float:
    """The relative difference; infinite, with the sign of the difference, if the reference is (nearly) 0."""
    if abs(reference) >= SMALLEST:
        return (loss - reference) / abs(reference)
    return 0.0 if loss == reference else math.copysign(math.inf, loss - reference)


def _learn_spread(state: State, rows: Sequence[Sequence[float | None]]) -> None:
    """Update the averaged squared spread from the seeds that have a value at every point of the block."""
    # Rows may differ in length: a baseline that joined within the block has no value before.
    width = min(len(row) for row in rows)
    columns = [[row[i] for row in rows] for i in range(width)]
    means = [_mean([v for v in column if v is not None]) for column in columns if None not in column]
    state["seeds"] = max(state.get("seeds", 0), len(means))
    if len(means) < SEEDS_FOR_SPREAD or abs(_mean(means)) < SMALLEST:
        return
    # The state is stored as JSON, which has no infinity.
    square = min(statistics.variance(means) / _mean(means) ** 2, LARGEST)
    before = square if state["spread"] is None else state["spread"]
    state["spread"] = before + SPREAD_WEIGHT * (square - before)


def _seed_tolerance(state: State) -> float:
    if state["spread"] is None:
        return 0.0
    spread, seeds = float(state["spread"]), int(state["seeds"])
    return SPREAD_FACTOR * math.sqrt(spread * (1.0 + 1.0 / seeds))


def _bet(state: State, sign: float, first_step: int) -> None:
    state["blocks"] += 1
    share = 1.0 / (state["blocks"] * (state["blocks"] + 1.0))
    state["wealth"] = [(a + share) * (1.0 + bet * sign) for a, bet in zip(state["wealth"], BETS, strict=True)]
    # The most likely start of the change is where the sum of signs was last at its minimum.
    state["cusum"] = max(state["cusum"], 0.0) + sign
    if state["cusum"] == 1.0 and sign > 0:
        state["onset"] = first_step


def wealth(state: State) -> float:
    """M_j: the evidence against H0, 1 at the start."""
    blocks: int = state["blocks"]
    return _mean(state["wealth"]) + 1.0 / (blocks + 1.0)


def _while_open(state: State, above: bool, step: int, parameters: Parameters) -> Finding | None:
    state["calm"] = 0 if above else state["calm"] + 1
    if state["calm"] < parameters["recover"]:
        return None
    onset = state["onset"]
    state.update(_fresh(), open=False, processes=state["processes"] + 1)
    return Finding(False, onset, step)


def _opened(state: State, step: int, delta: float, margin: float, reference: float, seeds: int) -> Finding:
    onset = state["onset"]
    since = f"Loss is above its baseline since about step {onset}"
    if math.isinf(delta):
        message = f"{since}: it is not finite at step {step}, where the baseline's is {in_words(reference)}."
    else:
        message = (
            f"{since}: {percent(delta)} over {in_words(reference)} at step {step}, "
            f"above the limit of {percent(margin)}."
        )
    evidence = {
        "e_value": wealth(state),
        "blocks": state["blocks"],
        "baseline": reference,
        "seeds": seeds,
    }
    return Finding(True, onset, step, finite(delta), margin, message, evidence)
