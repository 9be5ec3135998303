"""Axis ranges that stay readable if a run diverges."""

from __future__ import annotations

import numpy as np
from dashboard.helpers.seeding import losses
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fp8scope_dashboard.pages.charts.ranges import central_range, loss_range


def test_it_works() -> None:
    low, high = loss_range([np.array([5.0, 4.0, 3.0, 2.5, 2.0])]) or (0.0, 0.0)
    assert 1.5 < low < 2.0
    assert 5.0 < high < 5.6


def test_a_diverging_run_does_not_squash_the_others() -> None:
    healthy = [losses(300, seed) for seed in (1, 2, 3)]
    broken = losses(300, 4)
    broken[200:250] = np.geomspace(3, 1e6, 50)
    broken[250:] = np.nan
    alone, together = loss_range(healthy), loss_range([*healthy, broken])
    assert alone is not None and together is not None
    assert together[1] < 1.2 * alone[1]
    assert together[0] > 0.8 * alone[0]


def test_a_diverging_run_alone_keeps_its_healthy_part_readable() -> None:
    values = losses(300, 1)
    values[180:] = np.geomspace(3, 1e9, 120)
    low, high = loss_range([values]) or (0.0, 0.0)
    assert high < 10 and low > 1


def test_a_run_that_drops_far_does_not_squash_the_others() -> None:
    broken = losses(300, 4)
    broken[250:] = -1e6
    low, _ = loss_range([losses(300, 1), losses(300, 2), broken]) or (0.0, 0.0)
    assert low > -20


def test_includes_a_steep_fall_late_in_the_run() -> None:
    values = np.concatenate([np.full(400, 2.0), np.full(20, 0.05)])
    low, high = loss_range([values]) or (0.0, 0.0)
    assert low < 0.05 and high > 2.0


def test_leaves_out_a_spike_at_the_beginning() -> None:
    values = losses(300, 1)
    values[3] = 400.0
    _, high = loss_range([values]) or (0.0, 0.0)
    assert high < 10


def test_includes_all_ordinary_values() -> None:
    curves = [losses(300, seed) for seed in (1, 2, 3)]
    low, high = loss_range(curves) or (0.0, 0.0)
    assert low <= min(values.min() for values in curves)
    assert high >= np.quantile(np.concatenate(curves), 0.999)


def test_nothing_finite_has_no_range() -> None:
    assert loss_range([]) is None
    assert loss_range([np.array([np.nan, np.inf])]) is None
    assert central_range([]) is None
    assert central_range([np.full(5, np.nan)]) is None


def test_a_constant_has_a_range() -> None:
    for axis_range in (loss_range([np.full(10, 2.0)]), central_range([np.full(10, 0.0)])):
        assert axis_range is not None and axis_range[1] > axis_range[0]


def test_a_rate_begins_at_zero() -> None:
    low, _ = central_range([np.full(50, 0.25)], from_zero=True) or (1.0, 1.0)
    assert low == 0.0
    low, _ = central_range([np.full(50, -0.25)], from_zero=True) or (1.0, 1.0)
    assert low < -0.25


@example(np.array([5e-324]))
@example(np.array([0.0, 5e-324]))
@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-1e300, 1e300) | st.just(np.nan)))
def test_ranges_are_always_usable(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    for axis_range in (loss_range([values]), central_range([values])):
        if np.isnan(values).all():
            assert axis_range is None
        else:
            assert axis_range is not None and axis_range[0] < axis_range[1]
