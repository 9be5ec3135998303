"""Which numbers can be computed with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Losses and scores of a larger magnitude count as infinite, and denominators below its inverse as 0: squares,
# products and ratios of what is left stay finite.
LARGEST = 1e100
SMALLEST = 1.0 / LARGEST


def usable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where values are finite and of a magnitude that can be squared."""
    # NaN is not less than anything.
    return np.asarray(np.abs(values) <= LARGEST)
