"""Evidence against 'the block means are at most the tolerance', with a bound on false alarms over a run.

A process bets on the sign of each block's excess over the tolerance: the factor 1 + L xi_j with xi_j = +1 if
the mean is above it, else -1, for bets L in (0, 1). Its conditional mean is at most 1 if the conditional
median of the excess is at most 0. Heavy tails do no harm; each block at most doubles the capital.

**Portfolio.** The change may come at any block k, and the best L depends on its size. So the capital is split
over starting blocks by w_k = a(k) - a(k + 1) with a(k) = ln 2 / ln(k + 1), which sum to 1, and equally over
the bets. A share is idle until its block. With A_j(L) = (A_{j-1}(L) + w_j) times the factor of block j, the
wealth is the mean over L of A_j(L), plus a(j + 1) for the idle shares.

**Guarantee.** The wealth is a convex combination of non-negative supermartingales that start at 1, so Ville's
inequality gives P(exists j: M_j >= 1/a) <= a over the whole run, however long it is and whenever it is
stopped. It needs the assumption above *given the past*: block means that are correlated with earlier ones
break it. `noise` chooses blocks for which it (nearly) holds.

Sources: Ville (1939); Shin, Ramdas and Rinaldo, "E-detectors" (2024), for mixtures over starts.
"""

from __future__ import annotations

import math

from fp8scope_dashboard.analysis.losses.onsets.base import State

BETS = (0.2, 0.4, 0.6, 0.8, 0.95)


def fresh() -> State:
    """The state before the first block."""
    return {"blocks": 0, "capital": [0.0] * len(BETS)}


def bet(state: State, above: bool) -> None:
    """Bet on one block: whether its mean is above the tolerance."""
    state["blocks"] += 1
    share = _idle(state["blocks"]) - _idle(state["blocks"] + 1)
    sign = 1.0 if above else -1.0
    state["capital"] = [
        (capital + share) * (1.0 + bet * sign) for capital, bet in zip(state["capital"], BETS, strict=True)
    ]


def wealth(state: State) -> float:
    """The evidence: 1 at the start."""
    return sum(state["capital"]) / len(BETS) + _idle(state["blocks"] + 1)


def _idle(block: int) -> float:
    """The share of the capital that starts at this block or later."""
    return math.log(2.0) / math.log(block + 1.0)
