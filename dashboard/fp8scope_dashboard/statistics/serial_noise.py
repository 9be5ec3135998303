"""The correlation of successive values, which all estimates of serially correlated noise begin with."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats

Number = TypeVar("Number", float, Floats)


def lag_one(residuals: Floats) -> Floats:
    """The correlation of successive residuals, float64[..., n] to float64[...]; 0 where they are all 0.

    It is biased towards 0 and below, because residuals are closer to each other than errors; see `unbiased`.
    """
    products = (residuals[..., 1:] * residuals[..., :-1]).sum(axis=-1)
    power = (residuals**2).sum(axis=-1)
    return np.asarray(np.divide(products, power, out=np.zeros(np.shape(power)), where=power > 0.0))


def unbiased(correlation: Number, count: Number, terms: int = 1) -> Number:
    """The correlation of the errors, from that of `count` residuals about `terms` fitted coefficients.

    a + (p + (2 + p) a) / n: Kendall (1954) and Marriott & Pope (1954) for p = 1, the mean. It may be outside
    of -1 to 1.
    """
    return correlation + (terms + (2.0 + terms) * correlation) / count
