"""Degrees of freedom of sums of variances."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.statistics.variances import summed


def test_it_works() -> None:
    # Two means of four values each with equal spreads: Welch's degrees of freedom are those of both.
    assert summed([(2.0, 3.0), (2.0, 3.0)]) == pytest.approx((4.0, 6.0))
    assert summed([(1.0, 5.0)]) == pytest.approx((1.0, 5.0))
    # The larger variance decides.
    variance, freedom = summed([(100.0, 2.0), (1.0, 50.0)])
    assert variance == 101.0 and 2.0 < freedom < 2.1


def test_without_variance_the_most_freedom_counts() -> None:
    assert summed([(0.0, 3.0), (0.0, 7.0)]) == (0.0, 7.0)
    assert summed([]) == (0, 1.0)
