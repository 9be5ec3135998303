"""The difference between two arms of runs, each run with an estimate of its own. Pure functions.

With enough runs the spread between them gives the error, because it includes what runs differ by beyond their
own noise: seeds, nodes, neighbours on the network. Otherwise only the noise within the runs is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from fp8scope_dashboard.analysis.quantities.serial import Estimate
from fp8scope_dashboard.statistics.variances import summed

Source = Literal["runs", "within"]

# With one run in an arm, the other arm needs this many to stand in for its spread.
STANDING_IN: Final = 3


@dataclass(frozen=True)
class ArmDifference:
    """Mean of the first arm minus mean of the second.

    Attributes:
        source: "runs" if the error comes from the spread between runs, "within" if from the noise in them.
    """

    estimate: Estimate
    source: Source


def source_of(ours: int, theirs: int) -> Source:
    """Return where the error of a difference of arms of this many runs comes from."""
    enough = min(ours, theirs) >= 2 or (min(ours, theirs) == 1 and max(ours, theirs) >= STANDING_IN)
    return "runs" if enough else "within"


def difference(ours: Sequence[Estimate], theirs: Sequence[Estimate]) -> ArmDifference:
    """The difference of the arms' means; both hold at least one estimate.

    Two or more runs in each: Welch (1947). One against three or more: the spread of the larger arm holds for
    both (prediction interval). Else the runs' own variances, with Satterthwaite's (1946) degrees of freedom.
    """
    values = np.array([run.value for run in ours]), np.array([run.value for run in theirs])
    value = float(values[0].mean() - values[1].mean())
    source = source_of(len(ours), len(theirs))
    if source == "within":
        terms = [(run.variance / len(arm) ** 2, run.dof) for arm in (ours, theirs) for run in arm]
        return ArmDifference(combined(value, terms), source)
    if min(len(ours), len(theirs)) == 1:
        larger = max(values, key=len)
        variance = float(larger.var(ddof=1)) * (1.0 + 1.0 / len(larger))
        return ArmDifference(Estimate(value, variance, len(larger) - 1.0), source)
    return ArmDifference(
        combined(value, [(float(arm.var(ddof=1)) / len(arm), len(arm) - 1.0) for arm in values]), source
    )


def combined(value: float, terms: Sequence[tuple[float, float]]) -> Estimate:
    """An estimate whose variance is the sum of these variances, each with its degrees of freedom."""
    return Estimate(value, *summed(terms))
