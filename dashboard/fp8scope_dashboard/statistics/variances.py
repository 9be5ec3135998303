"""Sums of variances that are estimated with few degrees of freedom."""

from __future__ import annotations

from collections.abc import Sequence


def summed(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The sum of variances, each with its degrees of freedom, and the degrees of freedom of the sum.

    (Satterthwaite 1946): (sum v)^2 / sum(v^2 / d). Without any variance they do not matter, and are the
    largest of the terms'.
    """
    variance = sum(term for term, _ in terms)
    largest = max((freedom for _, freedom in terms), default=1.0)
    return variance, freedom_of_sum(variance, sum(term**2 / freedom for term, freedom in terms), largest)


def freedom_of_sum(variance: float, squares: float, otherwise: float) -> float:
    """The degrees of freedom of a sum of variances, from the sum of their squares over their own.

    `otherwise`: those of a sum without any variance.
    """
    return variance**2 / squares if squares > 0.0 else otherwise
