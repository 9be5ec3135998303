"""Least squares for neighbouring values whose errors are correlated. Pure functions.

The errors are taken as an AR(1) process. Its correlation r is estimated from the residuals and corrected for
the bias of short series (Kendall 1954; Marriott & Pope 1954): r = a + (p + (2 + p) a) / n, with a the lag-1
autocorrelation of the residuals of n values and p coefficients. A slow regressor then has n / tau effective
values with tau = (1 + r) / (1 - r) (Bartlett 1946), so that

    covariance = s^2 tau exp(-w / 2) (X'X)^-1,    s^2 = RSS / (n - p tau).

r has the variance (1 - r^2) / n (Bartlett), so log tau has the variance w = 4 / (n (1 - r^2)) (delta method).
Hence tau is too large by the factor exp(w / 2) on average, which the covariance takes back. The relative
variance of the estimated covariance is that of s^2 plus w, so that its degrees of freedom, 2 over it, are

    1 / dof = 1 / (n / tau - p) + w / 2.

Negative estimates count: to leave them out would make tau too large for uncorrelated errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.serial_noise import lag_one, unbiased
from fp8scope_dashboard.statistics.student import upper_quantile

MAX_GROUPS: Final = 48
"""Long series are averaged to this many groups first: means of long groups are nearly uncorrelated."""
LOWEST_CORRELATION: Final = -0.5
"""Errors of steps do not alternate more than this; a lower estimate is chance."""


@dataclass(frozen=True)
class Estimate:
    """A value with the variance of its error and the degrees of freedom of that variance."""

    value: float
    variance: float
    dof: float

    def interval(self, level: float) -> tuple[float, float]:
        """The Student-t interval at a level such as 0.95."""
        half = t_quantile(level, self.dof) * float(np.sqrt(self.variance))
        return self.value - half, self.value + half


@dataclass(frozen=True)
class Fit:
    """Coefficients float64[p], their covariance float64[p, p], and its degrees of freedom."""

    coefficients: Floats
    covariance: Floats
    dof: float

    def coefficient(self, index: int) -> Estimate:
        """One coefficient."""
        return Estimate(float(self.coefficients[index]), float(self.covariance[index, index]), self.dof)


def t_quantile(level: float, dof: float) -> float:
    """The quantile of Student's t for a two-sided interval."""
    return upper_quantile(0.5 - level / 2.0, dof)


def group_medians(values: Floats, smallest: int = 3, most: int = MAX_GROUPS) -> Floats:
    """Medians of groups of at least `smallest` neighbours, so that rare outliers do not count; float64[G]."""
    return np.concatenate([np.median(part, axis=1) for part in _groups(values, smallest, most)])


def group_means(values: Floats, smallest: int = 3, most: int = MAX_GROUPS) -> Floats:
    """Means of groups of at least `smallest` neighbours, float64[G]: rare pauses of a training count."""
    return np.concatenate([part.mean(axis=1) for part in _groups(values, smallest, most)])


def _groups(values: Floats, smallest: int, most: int) -> list[Floats]:
    """Groups of neighbours, as rows of one or two arrays: those with one value more come first."""
    groups = int(min(most, max(1, len(values) // smallest)))
    size, longer = divmod(len(values), groups)
    # The first groups have one value more, as in numpy.array_split.
    border = longer * (size + 1)
    parts = (values[:border].reshape(-1, size + 1), values[border:].reshape(-1, size))
    return [part for part in parts if len(part)]


def fit(design: Floats, values: Floats) -> Fit:
    """Least squares of values, float64[n], on a design, float64[n, p]; see the module.

    Raises:
        ValueError: there are fewer than p + 2 values.
    """
    count, terms = design.shape
    if count < terms + 2:
        raise ValueError(f"{count} values are too few for {terms} coefficients.")
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ (design.T @ values)
    residuals = values - design @ coefficients
    tau = _inflation(residuals, terms)
    correlation = (tau - 1.0) / (tau + 1.0)
    uncertainty = 4.0 / (count * (1.0 - correlation**2))
    scale = float(residuals @ residuals) / (count - terms * tau) * tau * np.exp(-uncertainty / 2.0)
    # Alternating errors make the mean better known, but not their variance.
    dof = 1.0 / (1.0 / (count / max(tau, 1.0) - terms) + uncertainty / 2.0)
    return Fit(coefficients, scale * inverse, max(1.0, dof))


def mean(values: Floats) -> Estimate:
    """The mean of a series, float64[n], n >= 3."""
    return fit(np.ones((len(values), 1)), values).coefficient(0)


def _inflation(residuals: Floats, terms: int) -> float:
    """tau of the module for the residuals of a fit, so that at least one degree of freedom stays."""
    count, total = len(residuals), float(residuals @ residuals)
    if total <= 0.0:
        return 1.0
    corrected = max(LOWEST_CORRELATION, unbiased(float(lag_one(residuals)), float(count), terms))
    most = count / (terms + 1.0)
    highest = (most - 1.0) / (most + 1.0)
    return (1.0 + min(corrected, highest)) / (1.0 - min(corrected, highest))
