"""Quantiles and tails of Student's t."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.statistics.student import quantiles_at, upper_quantile, upper_tail


@given(st.floats(1e-8, 1.0 - 1e-8), st.floats(1.0, 1e6))
def test_it_works(tail: float, freedom: float) -> None:
    quantile = upper_quantile(tail, freedom)
    assert quantile == pytest.approx(float(scipy.stats.t.isf(tail, freedom)), rel=1e-6, abs=1e-9)
    assert upper_tail(quantile, freedom) == pytest.approx(tail, rel=1e-6)


def test_infinite_freedom_is_the_normal_distribution() -> None:
    assert upper_quantile(0.025) == pytest.approx(1.959964, abs=1e-6)
    assert upper_tail(1.959964, math.inf) == pytest.approx(0.025, abs=1e-6)


def test_arrays_take_the_probabilities_of_normal_quantiles() -> None:
    quantiles = quantiles_at(np.array([1.959964, 1.959964]), np.array([4.0, 1e9]))
    assert quantiles == pytest.approx([upper_quantile(0.025, 4.0), 1.959964], rel=1e-5)
