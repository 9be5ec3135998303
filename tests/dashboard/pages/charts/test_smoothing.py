"""Smoothing of noisy curves with a centred average."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.pages.charts.smoothing import (
    LONGEST_SPAN,
    centred_average,
    default_span,
    exponential_average,
)


def test_it_works() -> None:
    assert centred_average(np.array([1.0, 2.0, 6.0, 2.0, 1.0]), 3).tolist() == [1.0, 3.0, 10 / 3, 3.0, 1.0]


@given(st.integers(1, 120), st.integers(0, 20))
def test_a_straight_line_is_unchanged(count: int, half: int) -> None:
    line = np.array([3.0 - 0.25 * i for i in range(count)])
    np.testing.assert_allclose(centred_average(line, 2 * half + 1), line, atol=1e-9)


def test_each_point_is_the_mean_of_its_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=101)
    smooth = centred_average(values, 11)
    for i in (0, 3, 50, 99, 100):
        half = min(5, i, 100 - i)
        assert smooth[i] == pytest.approx(values[i - half : i + half + 1].mean())


def test_values_that_are_not_finite_break_the_line_and_are_ignored() -> None:
    values = np.array([1.0, 1.0, np.nan, 1.0, np.inf, 1.0, 1.0])
    smooth = centred_average(values, 3)
    assert np.isnan(smooth[[2, 4]]).all()
    assert (smooth[[0, 1, 3, 5, 6]] == 1.0).all()


def test_a_huge_value_affects_only_its_neighbours() -> None:
    values = np.full(100, 2.0)
    values[50] = 1e30
    smooth = centred_average(values, 5)
    assert (smooth[:48] == 2.0).all() and (smooth[53:] == 2.0).all()


@pytest.mark.parametrize("span", [0, -1, 4])
def test_a_span_must_be_odd_and_positive(span: int) -> None:
    with pytest.raises(ValueError, match="odd"):
        centred_average(np.ones(5), span)


@given(st.integers(0, 10**7))
def test_default_spans_are_usable(points: int) -> None:
    span = default_span(points)
    assert span % 2 == 1 and 1 <= span <= LONGEST_SPAN


def test_an_empty_curve_stays_empty() -> None:
    assert len(centred_average(np.zeros(0), 3)) == 0


def test_an_exponential_average_is_that_of_its_definition() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0])
    first, second = 1.0, (0.5 * 1.0 + 3.0) / 1.5
    last = (0.125 * 1.0 + 0.25 * 3.0 + 5.0) / 1.375
    np.testing.assert_allclose(exponential_average(values, 0.5), [first, second, np.nan, last])
    np.testing.assert_allclose(exponential_average(np.full(50, 7.0), 0.99), 7.0)
    for weight in (-0.1, 1.0):
        with pytest.raises(ValueError, match="weight"):
            exponential_average(values, weight)
