"""The difference of a statistic between the tensors of two runs."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.charts.theme import THEMES, theme_named
from fp8scope_dashboard.pages.tensors import differences
from fp8scope_dashboard.pages.tensors.difference_map import difference_figure
from fp8scope_dashboard.pages.tensors.differences import (
    FARTHEST,
    common_statistics,
    compared,
    difference_map,
    lasting_difference,
    most_different,
    most_different_statistic,
)
from fp8scope_dashboard.runs.models import Run

NAMES = ("a.input", "b.input", "c.input")


@pytest.fixture
def pair(db: None) -> tuple[Run, Run]:
    """Two runs of 40 and 60 steps; the second has four times the amax of `b.input` from step 20 on."""
    project = Project.objects.create(slug="p", name="P")
    runs = []
    for number, (steps, names) in enumerate(((40, NAMES), (60, ("b.input", "a.input", "d.input")))):
        run = make_run(project, f"run {number}")
        amax = np.full((steps, 3), 2.0)
        if number:
            amax[20:, 0] = 8.0
        saturated = np.zeros((steps, 3))
        saturated[:, 0] = 10.0 * number
        Recorder(run=run, tensors=names).rows(
            np.arange(steps), {"loss": np.ones(steps)},
            {"amax": amax, "saturated": saturated, "nonfinite": 0 * amax, "numel": 0 * amax + 1000.0},
        )  # fmt: skip
        run.refresh_from_db()
        runs.append(run)
    return runs[0], runs[1]


def test_it_works(pair: tuple[Run, Run]) -> None:
    found = difference_map(*pair, "amax")
    assert found is not None
    assert found.names == ["b.input"] and (found.compared, found.different) == (2, 1)
    assert found.step_edges[0] == 0 and found.step_edges[-1] == 40, "the steps of both"
    middles = found.step_edges[:-1]
    np.testing.assert_allclose(found.values[0], np.where(middles < 20, 0.0, 2.0))


def test_rates_are_subtracted(pair: tuple[Run, Run]) -> None:
    found = difference_map(*pair, "saturation_rate", first=10, last=19)
    assert found is not None and found.is_rate and found.step_edges[-1] == 20
    assert found.names == ["b.input"]
    np.testing.assert_allclose(found.values, [[0.01] * 10])
    swapped = difference_map(pair[1], pair[0], "saturation_rate", first=10, last=19)
    assert swapped is not None
    np.testing.assert_allclose(swapped.values, -found.values)


def test_runs_without_common_steps_or_tensors_have_no_map(pair: tuple[Run, Run]) -> None:
    assert difference_map(*pair, "amax", first=50) is None
    empty = make_run(pair[0].project, "empty")
    assert difference_map(pair[0], empty, "amax") is None
    other = make_run(pair[0].project, "other")
    Recorder(run=other, tensors=("z",)).rows([1], {"loss": [1.0]}, {"amax": [[1.0]]})
    assert difference_map(pair[0], other, "amax") is None


def test_offers_rates_instead_of_counts(pair: tuple[Run, Run]) -> None:
    assert common_statistics(*pair) == ["overflow_rate", "amax", "nonfinite_rate", "saturation_rate"]


def test_shows_the_tensors_that_differ_most(pair: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference_map(*pair, "nonfinite_rate").names == []  # type: ignore[union-attr]
    monkeypatch.setattr(differences, "MAX_ROWS", 0)
    found = difference_map(*pair, "amax")
    assert found is not None and found.names == [] and (found.compared, found.different) == (2, 1)


def test_zero_in_one_run_only_is_far_and_in_both_is_equal() -> None:
    a = np.array([[0.0, 1.0, 0.0, np.nan, -2.0]])
    b = np.array([[0.0, 0.0, 1.0, 1.0, 4.0]])
    np.testing.assert_array_equal(compared(a, b, subtract=False), [[0.0, -FARTHEST, FARTHEST, np.nan, 1.0]])


VALUES = arrays(np.float64, (3, 4), elements=st.floats(1e-6, 1e6) | st.just(0.0) | st.just(np.nan))


@given(VALUES, VALUES, st.booleans())
def test_exchanging_the_runs_changes_the_sign(
    a: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    b: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    subtract: bool,
) -> None:
    np.testing.assert_array_equal(compared(a, b, subtract=subtract), -compared(b, a, subtract=subtract))


def test_rows_without_a_difference_are_left_out() -> None:
    values = np.array([[np.nan, np.nan], [1.0, np.nan], [0.0, -3.0], [0.0, 0.0]])
    assert most_different(values, 5) == [2, 1] and most_different(values, 1) == [2]
    assert most_different(values[:1], 5) == most_different(np.zeros((2, 0)), 5) == []


@pytest.mark.parametrize("is_rate", [True, False])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_draws_zero_in_the_middle_of_the_scale(is_rate: bool, theme: str) -> None:
    values = np.array([[0.0, 0.5, -0.5, np.nan]])
    figure = difference_figure(
        ["<a>"],
        np.arange(5),
        values,
        "amax",
        theme_named(theme),
        is_rate=is_rate,
        runs=("x", "y"),
    )
    (trace,) = figure.data
    assert trace.zmin == -trace.zmax and np.isnan(trace.z[0][3]) and trace.z[0][0] == 0
    assert trace.z[0][1] == -trace.z[0][2] > 0
    colours = [colour for _, colour in trace.colorscale]
    assert len(colours) % 2 == 1 and len(set(colours)) == len(colours), "one colour for zero"
    assert figure.layout.yaxis.ticktext == ("&lt;a&gt;",)


def test_equal_runs_are_drawn() -> None:
    figure = difference_figure(
        ["a"], np.arange(3), np.zeros((1, 2)), "amax", THEMES["light"], is_rate=False, runs=("x", "y")
    )
    assert figure.data[0].zmax == 1.0


def test_the_statistic_whose_difference_lasts_is_chosen(pair: tuple[Run, Run]) -> None:
    # Of 1,000 elements 10 are saturated in one run: ten times the limit. Amax differs by a factor of four.
    assert most_different_statistic(*pair, ["amax", "overflow_rate"]) == "overflow_rate"
    assert most_different_statistic(pair[0], pair[0], ["amax", "overflow_rate"]) == "amax"


def test_a_difference_lasts_through_the_run_or_to_its_end() -> None:
    def lasting(begin: int, end: int) -> float:
        values = np.zeros((2, 24))
        values[1, begin:end] = -3.0
        return lasting_difference(values)

    assert lasting(0, 24) == lasting(14, 24) == lasting(20, 24) == 3.0
    assert lasting(6, 10) == lasting(22, 24) == 0.0, "a spike, and what may be one"
    assert lasting_difference(np.full((2, 8), np.nan)) == lasting_difference(np.zeros((0, 8))) == 0.0
    values = np.full((1, 8), np.nan)
    values[0, 2] = 5.0
    assert lasting_difference(values) == 5.0, "the only value"
