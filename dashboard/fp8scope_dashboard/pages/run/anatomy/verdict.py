"""Decide whether a training waits: for its data, for copies, for other ranks, for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.student import upper_quantile

Verdict = Literal["waits", "works", "unknown"]

WAIT_BOUND: Final = 0.15
"""The smallest share of waiting that an advice names, too."""
GROUPS: Final = 10
"""Steps are judged in groups of neighbours, because neighbours resemble each other."""
TAIL: Final = 0.025


@dataclass(frozen=True, kw_only=True)
class WaitVerdict:
    """The verdict, the share of the time that is waiting, and its interval; NaN if it is not known."""

    verdict: Verdict
    share: float
    low: float
    high: float


def judge_waits(waits: Floats, whole: Floats) -> WaitVerdict:
    """Judge the share of `waits` in the time `whole` of the same steps, both float64[N] in seconds.

    The interval of 95 % is that of a ratio of means over ten groups of neighbouring steps, with Student's t
    (Cochran 1977, Sampling Techniques, section 6.4). The training waits if the interval is above WAIT_BOUND.
    """
    if len(whole) < GROUPS or not whole.sum() > 0:
        return WaitVerdict(verdict="unknown", share=float("nan"), low=float("nan"), high=float("nan"))
    edges = np.linspace(0, len(whole), GROUPS + 1).astype(np.int64)[:-1]
    waited, total = np.add.reduceat(waits, edges), np.add.reduceat(whole, edges)
    share = float(waited.sum() / total.sum())
    residual = waited - share * total
    error = float(np.sqrt((residual**2).sum() * GROUPS / (GROUPS - 1)) / total.sum())
    reach = upper_quantile(TAIL, GROUPS - 1) * error
    low, high = max(0.0, share - reach), min(1.0, share + reach)
    verdict: Verdict = "waits" if low > WAIT_BOUND else "works" if high <= WAIT_BOUND else "unknown"
    return WaitVerdict(verdict=verdict, share=share, low=low, high=high)
