"""First sustained onsets and changes of tensors."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.tensor_onsets import (
    SUSTAINED,
    WINDOW,
    default_limit,
    early_median,
    first_sustained,
    log2_change,
    ranked,
)

NAN = np.nan


def onset_of(row: list[float], limit: float = 0.5) -> int:
    values = np.array([row])
    return int(first_sustained(values > limit, ~np.isnan(values))[0])


def test_it_works() -> None:
    values = np.array([[0.0] * 5 + [0.2] * 5, [0.0] * 3 + [0.01] * 7, [0.0] * 10])
    result = ranked(values, "overflow_rate", 1e-3)
    assert result.onset.tolist() == [5, 3, -1]
    assert result.now.tolist() == [0.2, 0.01, 0.0] == result.ever.tolist()
    np.testing.assert_allclose(result.change, np.log2([2e5, 1e4, 1.0]))


@pytest.mark.parametrize(
    ("row", "onset"),
    [
        ([0, 1, 0, 0, 0, 0, 0], -1),
        ([0, 1, 1, 0, 0, 0, 0], -1),
        ([0, 1, 0, 1, 0, 1, 0], 1),
        ([0, 1, 0, 0, 0, 1, 1, 1], 5),
        ([0, 1, 0, 0, 1, 1, 0], 1),
        ([1, 1, 1], 0),
        ([0, 0, 0, 0, 0, 1, 1], -1),
        ([0, 0, 0, 0, 1, 1, 1], 4),
        ([1], -1),
        ([], -1),
    ],
)
def test_three_of_five_columns_are_sustained(row: list[float], onset: int) -> None:
    assert (SUSTAINED, WINDOW) == (3, 5)
    assert onset_of(row) == onset


def test_columns_without_a_value_are_skipped() -> None:
    assert onset_of([0, NAN, NAN, 1, NAN, NAN, NAN, 1, NAN, NAN, 1]) == 3
    assert onset_of([NAN, NAN]) == -1


def slow(over: NDArray[np.bool_], observed: NDArray[np.bool_]) -> int:
    columns = np.flatnonzero(observed).tolist()
    for i, column in enumerate(columns):
        if over[column] and sum(bool(over[c]) for c in columns[i : i + WINDOW]) >= SUSTAINED:
            return int(column)
    return -1


def test_equals_the_definition_written_as_a_loop() -> None:
    chance = np.random.default_rng(0)
    for _ in range(50):
        over, observed = chance.random((8, 30)) < 0.3, chance.random((8, 30)) < 0.7
        expected = [slow(over[i], observed[i]) for i in range(8)]
        assert first_sustained(over, observed).tolist() == expected


def test_other_statistics_leave_their_range_by_a_factor() -> None:
    amax = np.array([[1.0] * 10 + [5.0] * 10, [1.0] * 10 + [3.0] * 10, [8.0] * 10 + [1.0] * 10])
    result = ranked(amax, "amax", default_limit("amax"))
    assert result.onset.tolist() == [10, -1, 10]
    np.testing.assert_allclose(result.change, np.log2([5.0, 3.0, 1 / 8]))


def test_the_reference_is_the_median_of_the_first_tenth() -> None:
    values = np.full((2, 100), NAN)
    values[0] = np.arange(100.0)
    values[1, 40:] = 7.0
    assert early_median(values).tolist() == [4.5, 7.0]
    assert np.isnan(early_median(np.full((1, 5), NAN))).all()
    assert np.isnan(early_median(np.zeros((1, 0)))).all()


def test_medians_equal_numpy_s() -> None:
    chance = np.random.default_rng(1)
    values = np.where(chance.random((40, 57)) < 0.2, NAN, chance.random((40, 57)))
    for row, median in zip(values, early_median(values), strict=True):
        seen = row[~np.isnan(row)]
        assert median == np.median(seen[: max(3, int(np.ceil(0.1 * len(seen))))])


def test_zero_rates_have_a_change_and_zero_scales_have_none() -> None:
    assert log2_change(np.array([[0.0, 1e-6, 2e-6]]), np.zeros(1), "overflow_rate").tolist() == [[0, 0, 1]]
    assert np.isnan(log2_change(np.array([[0.0, 1.0]]), np.array([0.0]), "scale")).all()


def test_now_covers_the_last_columns() -> None:
    values = np.array([[0.9, 0.1, 0.5, 0.2, NAN]])
    assert ranked(values, "overflow_rate", 0.1, recent=2).now.tolist() == [0.2]
    assert ranked(values, "overflow_rate", 0.1, recent=50).now.tolist() == [0.9]
    assert np.isnan(ranked(values, "overflow_rate", 0.1, recent=1).now).all()


def test_ranks_tensors_without_columns() -> None:
    empty = ranked(np.zeros((3, 0)), "overflow_rate", 0.1)
    assert empty.onset.tolist() == [-1] * 3 and np.isnan(empty.ever).all() and np.isnan(empty.change).all()
