"""What the map of tensors shows: extremes of groups, differences between runs, and levels of colour."""

from __future__ import annotations

import numpy as np
import pytest

from fp8scope_dashboard.pages.tensors import modes
from fp8scope_dashboard.pages.tensors.map import without_gaps
from fp8scope_dashboard.telemetry.queries import Heatmap

NAN = np.nan
VALUES = np.array([[0.1, NAN, -3.0], [0.2, NAN, 1.0], [NAN, NAN, 2.0]])


def test_it_works() -> None:
    rows = modes.extremes(VALUES, [(0, 1), (2,)], signed=False)
    np.testing.assert_array_equal(rows, [[0.2, NAN, 1.0], [NAN, NAN, 2.0]])


def test_a_signed_group_shows_its_largest_change_in_either_direction() -> None:
    np.testing.assert_array_equal(modes.extremes(VALUES, [(0, 1, 2)], signed=True), [[0.2, NAN, -3.0]])


@pytest.mark.parametrize(
    ("statistic", "expected"), [("overflow_rate", [0.25, -0.5, NAN]), ("amax", [1.0, -1.0, NAN])]
)
def test_differences(statistic: str, expected: list[float]) -> None:
    own, other = np.array([[0.5, 0.5, 1.0]]), np.array([[0.25, 1.0, NAN]])
    np.testing.assert_array_equal(modes.difference(own, other, statistic), [expected])


def test_columns_of_another_run_are_matched_by_step() -> None:
    edges, other_edges = np.array([0, 10, 20, 30]), np.array([5, 12, 19, 25])
    matched = modes.aligned(edges, other_edges, np.array([[1.0, 2.0, 3.0]]))
    np.testing.assert_array_equal(matched, [[1.0, 3.0, 3.0]])
    same = modes.aligned(edges, edges, np.array([[1.0, NAN, 3.0]]))
    np.testing.assert_array_equal(same, [[1.0, NAN, 3.0]])
    apart = modes.aligned(edges, np.array([100, 200]), np.array([[1.0]]))
    assert np.isnan(apart).all()
    assert np.isnan(modes.aligned(edges, np.array([0]), np.zeros((1, 0)))).all()


def test_zero_and_missing_values_have_levels_of_their_own() -> None:
    scale = modes.scale_of_values(np.zeros(1), "overflow_rate")
    values = np.array([[NAN, 0.0, 1e-9, 1e-6, 1e-3, 1.0, 5.0]])
    assert modes.levels(values, scale).tolist() == [[0, 1, 2, 2, 128, 255, 255]]


def test_rates_have_the_same_colours_in_every_run() -> None:
    calm, wild = (modes.scale_of_values(np.array([rate]), "underflow_rate") for rate in (1e-5, 0.9))
    assert (calm.low, calm.high) == (wild.low, wild.high)


def test_other_statistics_are_scaled_to_their_values() -> None:
    scale = modes.scale_of_values(np.geomspace(1e-3, 1e3, 1000), "amax")
    assert -3.1 < scale.low < -2.9 and 2.9 < scale.high < 3.1
    for odd in ([], [2.0, 2.0], [NAN, 0.0]):
        scale = modes.scale_of_values(np.array(odd), "amax")
        assert scale.low < scale.high
        assert modes.levels(np.array([odd]), scale).dtype == np.uint8


def test_changes_are_symmetric_around_none() -> None:
    scale = modes.scale_of_changes(np.array([-2.0, 3.0]))
    assert modes.levels(np.array([-3.0, -1.5, 0.0, 1.5, 3.0, 99.0]), scale).tolist() == [
        1,
        64,
        128,
        192,
        255,
        255,
    ]
    assert [label for _, label in scale.marks] == ["÷ 8", "=", "× 8"]


def test_differences_of_rates_are_logarithmic_on_both_sides() -> None:
    scale = modes.scale_of_differences(np.zeros(1), "overflow_rate")
    values = np.array([-1.0, -1e-3, -1e-9, 0.0, 1e-9, 1e-3, 1.0])
    assert modes.levels(values, scale).tolist() == [1, 64, 128, 128, 128, 192, 255]


@pytest.mark.parametrize("statistic", ["overflow_rate", "amax"])
def test_marks_are_in_order_on_the_scale(statistic: str) -> None:
    values = np.geomspace(1e-5, 10.0, 50)
    for scale in (modes.scale_of_values(values, statistic), modes.scale_of_differences(values, statistic)):
        positions = [position for position, _ in scale.marks]
        assert positions == sorted(positions) and positions[-1] == modes.HIGHEST


def test_columns_are_as_wide_as_the_steps_between_observations() -> None:
    # Every third or fourth column has a value, as for statistics of every 100th step in columns of 30 steps.
    values = np.full((2, 40), np.nan)
    values[:, ::3] = np.arange(14.0)
    heatmap = Heatmap(["a", "b"], [0, 1], np.arange(41) * 30, values)
    wide = without_gaps(heatmap)
    assert wide.step_edges.tolist() == [*range(0, 1200, 90), 1200]
    assert wide.values[0].tolist() == list(np.arange(14.0))


def test_a_pause_in_the_observations_leaves_the_columns() -> None:
    values = np.ones((1, 40))
    values[:, 10:30] = np.nan
    heatmap = Heatmap(["a"], [0], np.arange(41), values)
    assert without_gaps(heatmap) is heatmap
