"""Is FP8's loss BF16's? Tests of equivalence over seeds, and a tolerance where there is only one FP8 run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

Floats = NDArray[np.float64]
TestVerdict = Literal["equivalent", "different", "inconclusive"]
SingleVerdict = Literal["within", "over"]

# Baseline seeds from which on their spread widens the tolerance: an SD of two says next to nothing.
SEEDS_FOR_SPREAD = 3
SPREAD_FACTOR = 3.0
# No ratio of usable numbers is larger.
MOST_ERROR = LARGEST / SMALLEST


@dataclass(frozen=True)
class EquivalenceTest:
    """What two one-sided tests said.

    Attributes:
        verdict: 'equivalent' when the interval lies within the margin, 'different' when it lies wholly
            outside, else 'inconclusive'.
        delta: relative difference of the arms' means.
        interval: of delta, at level 1 - 2 alpha, the one that goes with two one-sided tests at alpha.
        p_value: of the hypothesis that the arms are not equivalent: the larger of the two one-sided ones.
        degrees_of_freedom: Welch's.
    """

    verdict: TestVerdict
    delta: float
    interval: tuple[float, float]
    p_value: float
    degrees_of_freedom: float


def standard_error(losses: Floats) -> float:
    """Standard error of the mean of float64[K] losses, K >= 2."""
    return float(np.std(losses, ddof=1)) / math.sqrt(len(losses))


def relative_spread(losses: Floats) -> float:
    """Standard deviation (n - 1) of float64[K] seeds' losses over their mean; 0 for fewer than two."""
    if len(losses) < 2:
        return 0.0
    return float(np.std(losses, ddof=1)) / abs(float(np.mean(losses)))


def tolerance(baseline: Floats, margin: float) -> float:
    """Relative difference up to which one further run counts as within the baseline's noise.

    max(margin, 3 s sqrt(1 + 1/K)): sqrt(1 + 1/K) s is the standard error of a new seed's difference from
    the mean of K. A run of the baseline's own kind is over it with probability at most P(|t_{K-1}| > 3).
    """
    seeds = len(baseline)
    if seeds < SEEDS_FOR_SPREAD:
        return margin
    return max(margin, SPREAD_FACTOR * relative_spread(baseline) * math.sqrt(1.0 + 1.0 / seeds))


def judge_single(loss: float, baseline: Floats, margin: float) -> tuple[SingleVerdict, float, float]:
    """Judge one run's loss against float64[K] baseline losses: (verdict, relative delta, tolerance).

    No probability goes with it: one run says nothing about the spread of its own kind.
    """
    reference = float(np.mean(baseline))
    delta = (loss - reference) / abs(reference)
    allowed = tolerance(baseline, margin)
    return ("within" if abs(delta) <= allowed else "over"), delta, allowed


def two_one_sided_tests(run: Floats, baseline: Floats, margin: float, alpha: float) -> EquivalenceTest:
    """Two one-sided Welch t-tests (Schuirmann, 1987) of the relative difference of two arms' means.

    Args:
        run: float64[m] losses, one a seed, m >= 2.
        baseline: float64[K] losses, one a seed, K >= 2.
        margin: relative difference that counts as none.
        alpha: size of each of the two tests, and of the claim 'different'.

    The standard error of the ratio is the delta method's; Welch, because whether FP8 changes the spread
    between seeds is part of the question.

    Raises:
        ValueError: an arm has fewer than two seeds.
    """
    if len(run) < 2 or len(baseline) < 2:
        raise ValueError("A test over seeds needs at least two runs in each arm.")
    reference = float(np.mean(baseline))
    ratio = float(np.mean(run)) / reference
    delta = (ratio - 1.0) * math.copysign(1.0, reference)
    # Standard errors, not variances: the squares of large ones overflow. An error at the bound is as large as
    # delta can be, so the interval reaches beyond the margin on both sides.
    parts = [
        min(factor * (standard_error(losses) / abs(reference)), MOST_ERROR)
        for factor, losses in ((1.0, run), (abs(ratio), baseline))
    ]
    error = math.hypot(*parts)
    if error == 0.0:
        verdict: TestVerdict = "equivalent" if abs(delta) <= margin else "different"
        return EquivalenceTest(verdict, delta, (delta, delta), float(verdict == "different"), math.inf)
    shares = [part / error for part in parts]
    freedom = 1.0 / (shares[0] ** 4 / (len(run) - 1) + shares[1] ** 4 / (len(baseline) - 1))
    reach = float(scipy.stats.t.isf(alpha, freedom)) * error
    low, high = delta - reach, delta + reach
    p_value = max(
        float(scipy.stats.t.sf((delta + margin) / error, freedom)),
        float(scipy.stats.t.sf((margin - delta) / error, freedom)),
    )
    if -margin <= low and high <= margin:
        verdict = "equivalent"
    elif low > margin or high < -margin:
        verdict = "different"
    else:
        verdict = "inconclusive"
    return EquivalenceTest(verdict, delta, (low, high), p_value, freedom)
