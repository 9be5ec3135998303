"""The distribution that a difference over its standard error is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import scipy

from fp8scope_dashboard.statistics.student import upper_quantile, upper_tail

# One-sided level up to which a borrowed spread costs Student's quantile.
KNEE: Final = 0.025


@dataclass(frozen=True)
class ReferenceDistribution:
    """Student's t with `freedom` degrees of freedom.

    Attributes:
        borrowed: the spread between seeds is that of other runs. Its few degrees of freedom stand for what
            is not known about it, and that is the same at each checkpoint and task: it is paid for once, at
            the level KNEE. Beyond it the tail is that of a normal distribution, scaled to meet t there.
    """

    freedom: float = math.inf
    borrowed: bool = False

    def quantile(self, alpha: float) -> float:
        """The upper quantile at the one-sided level alpha."""
        if self.borrowed and alpha < KNEE:
            return self._knee * float(scipy.stats.norm.isf(alpha) / scipy.stats.norm.isf(KNEE))
        return upper_quantile(alpha, self.freedom)

    def above(self, ratio: float) -> float:
        """Probability of a larger value."""
        if self.borrowed and ratio > self._knee:
            return float(scipy.stats.norm.sf(ratio * float(scipy.stats.norm.isf(KNEE)) / self._knee))
        return upper_tail(ratio, self.freedom)

    @property
    def _knee(self) -> float:
        return upper_quantile(KNEE, self.freedom)
