"""The series among many that have changed, with a bound on the share of false claims among them.

Each series is compared with its own past, which gives a p-value; of thousands of p-values some are small by
chance. The procedures below choose a set in which the expected share of false claims, the false discovery
rate, is at most `level`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.serial_noise import lag_one, unbiased

LEVEL: Final = 0.05
METHOD_VERSION: Final = 1
# Cosine transforms in the estimate of the noise, and so the degrees of freedom.
FREQUENCIES: Final = 12
# Fewer points than this before or after the split give no p-value.
MIN_PAST: Final = 24
MIN_RECENT: Final = 8


def benjamini_hochberg(p_values: Floats, level: float = LEVEL) -> NDArray[np.bool_]:
    """The claims of p-values, float64[T], at a false discovery rate of `level`; NaN is no claim.

    Valid for p-values that are independent or positively dependent (Benjamini & Hochberg 1995; Benjamini &
    Yekutieli 2001), as those of tensors of one model are.
    """
    claims = np.zeros(len(p_values), bool)
    positions = np.flatnonzero(~np.isnan(p_values))
    if len(positions):
        claims[positions] = scipy.stats.false_discovery_control(p_values[positions], method="bh") <= level
    return claims


def e_benjamini_hochberg(e_values: Floats, level: float = LEVEL) -> NDArray[np.bool_]:
    """The claims of e-values, float64[T], at a false discovery rate of `level`, however they depend.

    The k largest are claimed, for the largest k whose smallest is at least T / (k * level) (Wang & Ramdas,
    "False discovery rate control with e-values", 2022). NaN is no claim.
    """
    claims = np.zeros(len(e_values), bool)
    positions = np.flatnonzero(~np.isnan(e_values))
    order = positions[np.argsort(-e_values[positions], kind="stable")]
    ranks = np.arange(1, len(order) + 1)
    enough = np.flatnonzero(e_values[order] * ranks * level >= len(order))
    if len(enough):
        claims[order[: enough[-1] + 1]] = True
    return claims


def e_values_of(p_values: Floats) -> Floats:
    """An e-value of each p-value: the mean of k p^(k-1) over k in (0, 1), (1 - p + p ln p) / (p ln² p).

    Both are float64[T]; NaN stays NaN. Vovk & Wang, "E-values: calibration, combination and applications"
    (2021). It is at most 1 in expectation where the p-value is uniform, so that its claims hold under any
    dependence, at a cost in power.
    """
    p = np.clip(p_values, 1e-300, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log(p)
        values = (1.0 - p + p * logarithm) / (p * logarithm**2)
    # The limit at p = 1.
    return np.where(np.isnan(p_values), np.nan, np.where(p > 1.0 - 1e-6, 0.5, values))


def change_p_values(values: Floats, split: int) -> Floats:
    """Two-sided p-values, float64[T], of a shift between columns before `split` and from it on.

    `values`: float64[T, N] over steps; NaN is filled with the last value before it. The test is a t-test of
    the two means, made robust in two ways:

    * values are replaced by normal scores of their ranks, so that an outlier counts as one large value;
    * the noise of the means is the long-run variance, from cosine transforms of the residuals within each
      part (equal-weighted cosine estimator, with as many degrees of freedom as transforms: Lazarus, Lewis,
      Stock & Watson, "HAR Inference", 2018). A first-order autocorrelation is corrected for, with Kendall's
      correction of its bias plus two standard errors, because a strong one shows at the lowest frequencies
      only (prewhitening: Andrews & Monahan 1992).

    A drift that goes on is not a change: it is in the residuals as well. NaN without MIN_PAST and
    MIN_RECENT observed columns; 1 for a series that never changes.
    """
    filled, observed = _filled(values)
    past, recent = observed[:, :split].sum(axis=1), observed[:, split:].sum(axis=1)
    p_values = np.full(len(values), np.nan)
    positions = np.flatnonzero((past >= MIN_PAST) & (recent >= MIN_RECENT))
    if len(positions):
        p_values[positions] = _shift_p_values(_normal_scores(filled[positions]), split)
    return p_values


def _shift_p_values(scores: Floats, split: int) -> Floats:
    n = scores.shape[1]
    means = scores[:, :split].mean(axis=1, keepdims=True), scores[:, split:].mean(axis=1, keepdims=True)
    parts = scores[:, :split] - means[0], scores[:, split:] - means[1]
    # Both parts give transforms in proportion to their length.
    first = min(max(round(FREQUENCIES * split / n), 1), FREQUENCIES - 1)
    numbers = first, FREQUENCIES - first
    autocorrelation = _autocorrelation(np.concatenate(parts, axis=1))
    powers = [_powers(part, number, autocorrelation) for part, number in zip(parts, numbers, strict=True)]
    variance = np.concatenate(powers, axis=1).mean(axis=1) * (1.0 / split + 1.0 / (n - split))
    difference = (means[1] - means[0])[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(difference == 0.0, 0.0, np.abs(difference) / np.sqrt(variance))
    return np.asarray(2.0 * scipy.stats.t.sf(t, FREQUENCIES), np.float64)


def _powers(residuals: Floats, number: int, autocorrelation: Floats) -> Floats:
    """The power at the lowest frequencies, float64[T, number], raised to that at frequency 0."""
    n = residuals.shape[1]
    frequencies = np.pi * np.arange(1, number + 1) / n
    waves = np.sqrt(2.0 / n) * np.cos(np.outer(frequencies, np.arange(n) + 0.5))
    a = autocorrelation[:, None]
    # The spectrum of AR(1) at 0, relative to that at each frequency.
    ratio = (1.0 - 2.0 * a * np.cos(frequencies) + a**2) / (1.0 - a) ** 2
    return np.asarray((residuals @ waves.T) ** 2 * ratio, np.float64)


def _autocorrelation(residuals: Floats) -> Floats:
    """A first-order autocorrelation that is rather too large than too small, within [0, 0.99]."""
    n = residuals.shape[1]
    estimate = lag_one(residuals)
    error = np.sqrt(np.maximum(1.0 - estimate**2, 0.0) / n)
    # Each of the two parts has a mean of its own.
    cautious = unbiased(estimate, np.full(len(residuals), float(n)), terms=2) + 2.0 * error
    return np.asarray(np.clip(cautious, 0.0, 0.99), np.float64)


def _normal_scores(values: Floats) -> Floats:
    """Normal quantiles of the ranks within each row; equal values have the same score."""
    ranks = scipy.stats.rankdata(values, axis=1)
    return np.asarray(scipy.stats.norm.ppf((ranks - 0.5) / values.shape[1]), np.float64)


def _filled(values: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Each NaN replaced by the last value before it, else the first after it; where values were observed."""
    observed = ~np.isnan(values)
    positions = np.where(observed, np.arange(values.shape[1]), -1)
    last = np.maximum.accumulate(positions, axis=1)
    first = np.argmax(observed, axis=1)[:, None]
    filled = np.take_along_axis(values, np.where(last < 0, first, last), axis=1)
    return filled, observed
