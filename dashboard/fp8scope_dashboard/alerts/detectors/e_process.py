r"""Evidence against 'the block means are at most the margin', with a bound on false alarms over a whole run.

**Two processes** bet on the excess of each block's mean over its margin, in units of its predicted standard
deviation: z_j. They share a capital of 1 equally.

* *Sign*: the factor 1 + L xi_j with xi_j = +1 if z_j > 0 else -1, for bets L in (0, 1). Its conditional mean
  is at most 1 if the conditional median of z_j is at most 0. Heavy tails do no harm, but each block at most
  doubles the capital.
* *Magnitude*: the factor exp(L min(z_j, c)) / B(L) with B(L) = (c^2 exp(-L/c) + exp(L c)) / (c^2 + 1). B is
  the largest mean of exp(L Z) over all Z <= c with mean at most 0 and second moment at most 1 (Bennett,
  1962), so the factor's conditional mean is at most 1 if the conditional mean of z_j is at most 0 and its
  second moment at most 1. A block multiplies the capital by up to c^2 + 1.

**Portfolio.** The change may come at any block k, and the best L depends on its size. So each process splits
its capital over starting blocks by w_k = a(k) - a(k + 1) with a(k) = ln 2 / ln(k + 1), which sum to 1, and
equally over its bets. A share is idle until its block. With A_j(L) = (A_{j-1}(L) + w_j) times the factor of
block j, the wealth of a process is the mean over L of A_j(L), plus a(j + 1) for the idle shares.

**Guarantee.** The total is a convex combination of non-negative supermartingales that start at 1, so Ville's
inequality gives P(exists j: M_j >= 1/a) <= a over the whole run, however long it is and whenever it is
stopped. It needs the assumptions above *given the past*: block means that are correlated with earlier ones
break it. `block_length` chooses blocks for which they (nearly) hold.

Sources: Ville (1939); Bennett (1962); Shin, Ramdas and Rinaldo, "E-detectors" (2024), for mixtures over
starts.
"""

from __future__ import annotations

import math

from fp8scope_dashboard.alerts.detectors.base import State

SIGN_BETS = (0.2, 0.4, 0.6, 0.8, 0.95)
MAGNITUDE_BETS = (0.1, 0.25, 0.5, 1.0)
# Excesses of more standard deviations count as this many.
MOST_DEVIATIONS = 5.0


def _bennett(bet: float) -> float:
    square = MOST_DEVIATIONS**2
    return (square * math.exp(-bet / MOST_DEVIATIONS) + math.exp(bet * MOST_DEVIATIONS)) / (square + 1.0)


BOUNDS = tuple(_bennett(bet) for bet in MAGNITUDE_BETS)


def fresh() -> State:
    """The state before the first block."""
    return {"blocks": 0, "sign": [0.0] * len(SIGN_BETS), "magnitude": [0.0] * len(MAGNITUDE_BETS)}


def bet(state: State, above: bool, deviations: float) -> None:
    """Bet on one block: whether its mean is above the margin, and its excess in predicted deviations."""
    state["blocks"] += 1
    share = _idle(state["blocks"]) - _idle(state["blocks"] + 1)
    sign = 1.0 if above else -1.0
    z = min(deviations, MOST_DEVIATIONS)
    state["sign"] = [
        (capital + share) * (1.0 + bet * sign) for capital, bet in zip(state["sign"], SIGN_BETS, strict=True)
    ]
    state["magnitude"] = [
        (capital + share) * math.exp(bet * z) / bound
        for capital, bet, bound in zip(state["magnitude"], MAGNITUDE_BETS, BOUNDS, strict=True)
    ]


def wealth(state: State) -> float:
    """The evidence of both processes together: 1 at the start."""
    idle = _idle(state["blocks"] + 1)
    sign = sum(state["sign"]) / len(SIGN_BETS)
    magnitude = sum(state["magnitude"]) / len(MAGNITUDE_BETS)
    return 0.5 * (sign + magnitude) + idle


def _idle(block: int) -> float:
    """The share of the capital that starts at this block or later."""
    return math.log(2.0) / math.log(block + 1.0)
