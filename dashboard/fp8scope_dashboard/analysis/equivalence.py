"""Tests of equivalence of two arms' losses over seeds, and a tolerance if there is only one FP8 run."""

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

# With at least so many baseline seeds, their spread widens the tolerance: the SD of two seeds is too
# uncertain.
SEEDS_FOR_SPREAD = 3
SPREAD_FACTOR = 3.0
# The largest ratio of two usable numbers.
LARGEST_ERROR = LARGEST / SMALLEST


@dataclass(frozen=True)
class EquivalenceTest:
    """Result of two one-sided tests.

    Attributes:
        verdict: 'equivalent' if the interval lies within the margin, 'different' if it lies wholly outside,
            else 'inconclusive'.
        delta: relative difference of the arms' means.
        interval: of delta, at level 1 - 2 alpha, which corresponds to two one-sided tests at alpha.
        p_value: of the hypothesis that the arms are not equivalent: the larger of the two one-sided p-values.
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
    """Standard deviation (n - 1) of the losses of K seeds, float64[K], over their mean; 0 if K < 2."""
    if len(losses) < 2:
        return 0.0
    return float(np.std(losses, ddof=1)) / abs(float(np.mean(losses)))


def tolerance(baseline: Floats, margin: float) -> float:
    """Relative difference up to which one further run counts as within the noise of the baseline.

    max(margin, 3 s sqrt(1 + 1/K)), where sqrt(1 + 1/K) s is the standard error of the difference between a
    new seed and the mean of K seeds. A further run of the baseline's configuration exceeds it with
    probability at most P(|t_{K-1}| > 3).
    """
    seeds = len(baseline)
    if seeds < SEEDS_FOR_SPREAD:
        return margin
    return max(margin, SPREAD_FACTOR * relative_spread(baseline) * math.sqrt(1.0 + 1.0 / seeds))


def judge_single(loss: float, baseline: Floats, margin: float) -> tuple[SingleVerdict, float, float]:
    """Judge one run's loss against float64[K] baseline losses: (verdict, relative delta, tolerance).

    The verdict has no probability: one run does not show the spread between seeds of its configuration.
    """
    reference = float(np.mean(baseline))
    delta = (loss - reference) / abs(reference)
    allowed = tolerance(baseline, margin)
    return ("within" if abs(delta) <= allowed else "over"), delta, allowed


def two_one_sided_tests(run: Floats, baseline: Floats, margin: float, alpha: float) -> EquivalenceTest:
    """Two one-sided Welch t-tests (Schuirmann, 1987) of the relative difference of two arms' means.

    Args:
        run: float64[m] losses, one per seed, m >= 2.
        baseline: float64[K] losses, one per seed, K >= 2.
        margin: relative difference that counts as none.
        alpha: size of each of the two tests, and of the claim 'different'.

    The standard error of the ratio comes from the delta method. Welch's test is used because FP8 may change
    the spread between seeds.

    Raises:
        ValueError: if an arm has fewer than two seeds.
    """
    if len(run) < 2 or len(baseline) < 2:
        raise ValueError("A test over seeds needs at least two runs in each arm.")
    reference = float(np.mean(baseline))
    ratio = float(np.mean(run)) / reference
    delta = (ratio - 1.0) * math.copysign(1.0, reference)
    # Standard errors, not variances: squares of large values overflow. An error at the bound is as large as
    # delta can be, so the interval still exceeds the margin on both sides.
    parts = [
        min(factor * (standard_error(losses) / abs(reference)), LARGEST_ERROR)
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
