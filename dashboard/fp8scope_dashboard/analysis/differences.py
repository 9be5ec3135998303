"""Differences between the scores of two runs: over the same items (paired) and over different ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.intervals import (
    Interval,
    around,
    quantile,
    standard_error,
    two_sided,
    wilson,
)

Floats = NDArray[np.float64]

# With fewer discordant pairs the normal approximation is poor: use the exact McNemar test.
EXACT_BELOW = 25


@dataclass(frozen=True)
class Difference:
    """Score of the run minus score of the baseline.

    Attributes:
        interval: of the difference, at level 1 - alpha.
        error: standard error of the difference.
        p_value: two-sided, of the hypothesis of no difference.
    """

    method: str
    difference: float
    interval: Interval
    error: float
    p_value: float


def mcnemar(run: Floats, baseline: Floats) -> float:
    """Exact two-sided p-value of two runs being correct equally often on the same items (McNemar, 1947).

    Args:
        run, baseline: float64[n] of 0 and 1, item by item.

    Under the hypothesis, discordant items are tosses of a fair coin. The p-value is 1 without any.
    """
    only_run = int(np.sum((run == 1) & (baseline == 0)))
    only_baseline = int(np.sum((run == 0) & (baseline == 1)))
    discordant = only_run + only_baseline
    if discordant == 0:
        return 1.0
    return min(1.0, 2.0 * float(scipy.stats.binom.cdf(min(only_run, only_baseline), discordant, 0.5)))


def paired(
    run: Floats,
    baseline: Floats,
    alpha: float,
    *,
    clusters: Sequence[str] | None = None,
    proportion: bool = False,
) -> Difference:
    """Difference of two means over the same float64[n] items, from the differences per item.

    The difficulty of each item cancels. With clusters, the standard error is clustered and the quantile is
    Student-t's. For proportions with few discordant items, the p-value is that of the exact McNemar test.
    """
    differences = run - baseline
    error = standard_error(differences, clusters)
    mean = float(differences.mean())
    freedom = math.inf if clusters is None else len(set(clusters)) - 1
    interval = around(mean, quantile(alpha, freedom) * error)
    method = "paired differences" if clusters is None else "paired differences, clustered"
    p_value = two_sided(mean, error, freedom)
    binary = proportion and bool(np.isin(run, (0, 1)).all() and np.isin(baseline, (0, 1)).all())
    if binary and clusters is None and int(np.count_nonzero(differences)) < EXACT_BELOW:
        method, p_value = "paired differences, exact McNemar p", mcnemar(run, baseline)
    return Difference(method, mean, interval, error, p_value)


def unpaired(
    run: Floats,
    baseline: Floats,
    alpha: float,
    *,
    clusters: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    proportion: bool = False,
) -> Difference:
    """Difference of two means over different items.

    For proportions: the interval of Newcombe (1998, method 10, from the two Wilson intervals) and a z test.
    For means and clustered items: normal approximation with the sum of the squared standard errors.
    """
    mean = float(run.mean() - baseline.mean())
    errors = [standard_error(items, names) for items, names in zip((run, baseline), clusters, strict=True)]
    error = math.hypot(*errors)
    if not proportion or any(clusters):
        return Difference(
            "difference of means", mean, around(mean, quantile(alpha) * error), error, two_sided(mean, error)
        )
    ours = wilson(int(run.sum()), len(run), alpha)
    theirs = wilson(int(baseline.sum()), len(baseline), alpha)
    share, reference = float(run.mean()), float(baseline.mean())
    interval = Interval(
        mean - math.hypot(share - ours.low, theirs.high - reference),
        mean + math.hypot(ours.high - share, reference - theirs.low),
    )
    pooled = float(np.concatenate([run, baseline]).mean())
    null_error = math.sqrt(pooled * (1.0 - pooled) * (1.0 / len(run) + 1.0 / len(baseline)))
    return Difference("Newcombe", mean, interval, error, two_sided(mean, null_error))
