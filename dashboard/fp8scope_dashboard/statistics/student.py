"""Student's t: the one place with its quantiles and tails."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from scipy import special

from fp8scope_dashboard.statistics.arrays import Floats

MAX_QUANTILE: Final = 1e12


def upper_quantile(tail: float, freedom: float = math.inf) -> float:
    """The value that Student's t exceeds with probability `tail`; that of the normal without `freedom`."""
    return -float(special.stdtrit(freedom, tail)) if math.isfinite(freedom) else -float(special.ndtri(tail))


def upper_tail(value: float, freedom: float = math.inf) -> float:
    """The probability that Student's t exceeds a value; that of the normal without `freedom`."""
    return float(special.stdtr(freedom, -value)) if math.isfinite(freedom) else float(special.ndtr(-value))


def quantiles_at(z: Floats, freedom: Floats) -> Floats:
    """Quantiles of Student's t at the probabilities of normal quantiles z, float64 of their common shape.

    At most MAX_QUANTILE, which they reach with few degrees of freedom.
    """
    quantiles = -special.stdtrit(freedom, special.ndtr(-z))
    return np.asarray(np.minimum(np.nan_to_num(quantiles, nan=MAX_QUANTILE), MAX_QUANTILE))
