r"""Is the run's loss above its baseline's? A sign e-process with a bound on false alarms over the whole run.

**The data.** The relative difference d_t = (loss_t - b_t) / abs(b_t) to the mean b_t of the baseline's
seeds at the same step, averaged over blocks of `block` points: D_1, D_2, ...; each block has a margin m_j
that is known without looking at the run (below). Only the sign xi_j = +1 if D_j > m_j else -1 is used, so
a heavy tail can do no harm.

**The hypothesis.** H0: the median of D_j given the blocks before it is at most m_j, P(xi_j = +1 | past) <=
1/2.

**The e-process.** For a bet L in (0, 1) the factor 1 + L xi_j is >= 0 and has conditional mean at most 1
under H0. So the product of the factors from block k on is a non-negative supermartingale begun at 1. The
change may come at any k, and the best L depends on how often blocks are above: so we hold a portfolio. A
capital of 1 is split over starting blocks by w_k = 1 / (k (k + 1)), which sum to 1, and over the bets of
BETS equally; a share lies idle until its block comes. With A_j(L) = (A_{j-1}(L) + w_j) (1 + L xi_j) the
wealth is

    M_j = mean over L of A_j(L)  +  1 / (j + 1)            (the idle shares: the sum of w_k over k > j)

**The guarantee.** Under H0 M is a convex combination of non-negative supermartingales begun at 1, so it is
one itself, M_0 = 1, and Ville's inequality gives P(exists j: M_j >= 1/a) <= a: over the *whole* run,
however long and whenever it is stopped. (The plain e-Shiryaev-Roberts statistic, the same recursion with
w_j = 1, has E[R_j] <= j and controls the average run length to a false alarm, not its probability;
weighting the starts with a sum of 1 is what turns it into an e-process, at the price of ln k(k+1) in the
delay.) After an alarm that was resolved, the process begins anew. The i-th process may alarm at 1/a_i with
a_i = alpha 2^-i, so that all processes of a run together give *any* false alarm with probability at most
alpha, by the union bound.

Where H0 fails although the configuration is the same: two seeds differ by a persistent offset. Hence m_j
is the tolerance of `analysis.equivalence`, max(margin, 3 s_j sqrt(1 + 1/K)), with s_j the relative SD
between K >= 3 seeds' block means, its square averaged exponentially over blocks up to j (one block's SD of
three seeds is a poor estimate). With fewer seeds the margin stands alone, or the last s_j when there were
three before.

Sources: Ville (1939); Shin, Ramdas and Rinaldo, "E-detectors" (2024), for e-SR and mixtures over bets;
docs/statistics.md has the simulation of the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.base import Finding, State, finite, percent, words
from fp8scope_dashboard.analysis.equivalence import SEEDS_FOR_SPREAD, SPREAD_FACTOR
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

Floats = NDArray[np.float64]
Parameters = Mapping[str, float]

BETS = (0.2, 0.4, 0.6, 0.8, 0.95)
# Weight of a new block in the average of the squared spread between seeds.
SPREAD_WEIGHT = 0.05


def above_baseline(
    state: State,
    steps: NDArray[np.int64],
    losses: Floats,
    baselines: Floats,
    parameters: Parameters,
) -> tuple[State, list[Finding]]:
    """Open when the e-process finds the run above its baseline; close after `recover` blocks that are not.

    Args:
        steps: int64[n], ascending, above all steps given before (others are ignored).
        losses: float64[n]; NaN and infinities count as above.
        baselines: float64[K, n], one row per baseline seed, NaN where it has no (finite) value. Steps at
            which no seed has one are ignored.
        parameters: `margin` (relative), `alpha`, `block` (points), `recover` (blocks).

    The result does not depend on how the points were cut into batches, as long as the seeds are the same.
    """
    state = {**_fresh(), "last_step": None, "processes": 0, "spread": None, "open": False, **state}
    findings = []
    for step, loss, seeds in zip(steps.tolist(), losses.tolist(), baselines.T.tolist(), strict=True):
        if state["last_step"] is not None and step <= state["last_step"]:
            continue
        state["last_step"] = step
        # NaN and infinities travel as None: JSON has no word for them, and here they all mean 'above'.
        known = [finite(seed) for seed in seeds]
        if not any(seed is not None for seed in known):
            continue
        state["points"] = [*state["points"], [step, finite(loss), known]]
        if len(state["points"]) >= parameters["block"]:
            found = _block(state, parameters)
            if found:
                findings.append(found)
    return state, findings


def _fresh() -> State:
    return {"points": [], "blocks": 0, "wealth": [0.0] * len(BETS), "cusum": 0.0, "onset": None, "calm": 0}


def _block(state: State, parameters: Parameters) -> Finding | None:
    """Judge the block that is full. Plain numbers: at this size arrays would cost ten times as much."""
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
    """The relative difference; infinite on the loss's side where the reference is (nearly) 0."""
    if abs(reference) >= SMALLEST:
        return (loss - reference) / abs(reference)
    return 0.0 if loss == reference else math.copysign(math.inf, loss - reference)


def _learn_spread(state: State, rows: Sequence[Sequence[float | None]]) -> None:
    """Update the averaged squared spread from the seeds that have a value at every point of the block."""
    # A baseline that joined within the block has no value before: rows may differ in length.
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
    # The likeliest start of the change: where the sum of signs was last at its minimum.
    state["cusum"] = max(state["cusum"], 0.0) + sign
    if state["cusum"] == 1.0 and sign > 0:
        state["onset"] = first_step


def wealth(state: State) -> float:
    """M_j: the evidence against 'not above the margin', 1 at the start."""
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
    by = "by more than can be told (it is not finite)" if math.isinf(delta) else f"{percent(delta)}"
    message = (
        f"Loss is above its baseline since about step {onset}: {by} over {words(reference)} at step {step}, "
        f"where {percent(margin)} is allowed."
    )
    evidence = {
        "e_value": wealth(state),
        "blocks": state["blocks"],
        "baseline": reference,
        "seeds": seeds,
    }
    return Finding(True, onset, step, finite(delta), margin, message, evidence)
