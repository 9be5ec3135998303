"""Two one-sided tests of the equivalence of two arms' losses over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from fp8scope_dashboard.analysis.losses.seeds import Spread
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.student import upper_quantile, upper_tail
from fp8scope_dashboard.statistics.variances import summed
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

Verdict = Literal["equivalent", "worse", "better", "cannot_tell"]

# The largest ratio of two usable numbers.
MAX_ERROR = LARGEST / SMALLEST
# The arms have different spreads if the ratio of their variances is beyond this quantile of F.
UNEQUAL = 0.975


@dataclass(frozen=True, kw_only=True)
class EquivalenceTest:
    """Result of two one-sided tests.

    Attributes:
        verdict: 'equivalent' if the interval lies within the margin, 'worse' or 'better' if it lies wholly
            above or below, else 'cannot_tell'.
        delta: difference of the arms' means, over `scale`.
        interval: of delta, at level 1 - 2 alpha, which corresponds to two one-sided tests at alpha.
        claim: of delta, for 'worse' and 'better': slightly wider, see `claim_quantile`.
        error: standard error of delta.
        p_value: of the hypothesis that the arms are not equivalent: the larger of the two one-sided p-values.
        freedom: degrees of freedom.
        pooled: the spread is that of both arms and a prior; otherwise it is Welch's.
    """

    verdict: Verdict
    delta: float
    interval: tuple[float, float]
    claim: tuple[float, float]
    error: float
    p_value: float
    freedom: float
    pooled: bool = False


def standard_error(losses: Floats) -> float:
    """Standard error of the mean of float64[K] losses, K >= 2."""
    return float(np.std(losses, ddof=1)) / math.sqrt(len(losses))


def claim_quantile(alpha: float, freedom: float, margin: float) -> float:
    """The quantile q with T(-q) + T(-q - 2 margin) = alpha, where `margin` is in standard errors.

    At a difference of the margin, 'worse' is wrong with probability T(-q) and 'better' with T(-q - 2 margin).
    Their sum is alpha: between the one-sided quantile (wide margins) and the two-sided one (no margin).
    """
    if not math.isfinite(margin):
        return upper_quantile(alpha, freedom)
    low, high = upper_quantile(alpha, freedom), upper_quantile(alpha / 2.0, freedom)

    def excess(quantile: float) -> float:
        return upper_tail(quantile, freedom) + upper_tail(quantile + 2.0 * margin, freedom) - alpha

    # Rounding may move the root to just outside the bracket.
    if excess(low) <= 0.0:
        return low
    return high if excess(high) >= 0.0 else float(scipy.optimize.brentq(excess, low, high, xtol=1e-9))


def two_one_sided_tests(
    run: Floats, baseline: Floats, margin: float, alpha: float, spread: Spread | None, *, scale: float
) -> EquivalenceTest:
    """Two one-sided tests (Schuirmann, 1987) of the difference of two arms' means.

    Args:
        run: float64[m] losses, one per seed, m >= 2.
        baseline: float64[K] losses, one per seed, K >= 2.
        margin: difference that counts as none, over `scale`.
        alpha: size of each of the two tests, and of the claim 'worse' or 'better'.
        spread: of the seeds on the same scale, shrunk towards a prior: the test is a moderated t test (Smyth,
            2004). None, or arms whose own spreads differ (FP8 may change the spread): Welch's (1947).
        scale: what the difference is divided by: the baseline's mean, or 1 for nats.

    Raises:
        ValueError: if an arm has fewer than two seeds.
    """
    if len(run) < 2 or len(baseline) < 2:
        raise ValueError("A test over seeds needs at least two runs in each arm.")
    delta = float(np.mean(run)) / scale - float(np.mean(baseline)) / scale
    error, freedom = _welch(run, baseline, scale)
    pooled = spread is not None and not _spreads_differ(run, baseline)
    if spread is not None and pooled:
        error, freedom = spread.error(len(run), len(baseline)), spread.freedom
    reach = upper_quantile(alpha, freedom) * error
    claim = claim_quantile(alpha, freedom, margin / error if error > 0.0 else math.inf) * error
    interval, claimed = (delta - reach, delta + reach), (delta - claim, delta + claim)
    return EquivalenceTest(
        verdict=conclusion(interval, claimed, margin),
        delta=delta,
        interval=interval,
        claim=claimed,
        error=error,
        p_value=max(tail(side * delta + margin, error, freedom) for side in (1.0, -1.0)),
        freedom=freedom,
        pooled=pooled,
    )


def _welch(run: Floats, baseline: Floats, scale: float) -> tuple[float, float]:
    """Welch's standard error and degrees of freedom; that of the ratio of the means by the delta method."""
    reference = float(np.mean(baseline))
    ratio = 1.0 if scale == 1.0 or reference == 0.0 else float(np.mean(run)) / reference
    # Standard errors, not variances: squares of large values overflow. An error at the bound is as large as
    # delta can be, so the interval still exceeds the margin on both sides.
    parts = [
        min(factor * (standard_error(losses) / scale), MAX_ERROR)
        for factor, losses in ((1.0, run), (abs(ratio), baseline))
    ]
    error = math.hypot(*parts)
    if error == 0.0:
        return 0.0, math.inf
    # As shares of the error, whose squares are finite.
    terms = [((part / error) ** 2, len(arm) - 1.0) for part, arm in zip(parts, (run, baseline), strict=True)]
    return error, summed(terms)[1]


def _spreads_differ(run: Floats, baseline: Floats) -> bool:
    """Return whether a two-sided F test finds that one arm spreads more than the other."""
    more, less = sorted((float(np.std(losses, ddof=1)), len(losses) - 1) for losses in (baseline, run))[::-1]
    return more[0] > less[0] * math.sqrt(float(scipy.special.fdtri(more[1], less[1], UNEQUAL)))


def tail(distance: float, error: float, freedom: float) -> float:
    """Probability that Student's t is below -distance / error."""
    if error == 0.0:
        return float(distance < 0.0)
    return upper_tail(distance / error, freedom)


def conclusion(interval: tuple[float, float], claim: tuple[float, float], tolerance: float) -> Verdict:
    """The verdict from an interval (for 'equivalent') and one for the claim of a difference."""
    if -tolerance <= interval[0] and interval[1] <= tolerance:
        return "equivalent"
    if claim[0] > tolerance:
        return "worse"
    return "better" if claim[1] < -tolerance else "cannot_tell"
