"""Merging the rows of several writers equals a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.telemetry.rank_merge import (
    DATA_HASH_MODULUS,
    DERIVED,
    SUMMED,
    RankRows,
    across_ranks,
    data_hash_across_ranks,
    derive,
    first_of_each_step,
    sources,
)

VALUES = st.sampled_from([math.nan, 0.0, 1.0, 2.5, -1.0])


@st.composite
def parts(draw: st.DrawFn) -> list[RankRows]:
    """Parts of two series each from up to three ranks, in order of rank."""
    made = []
    for order, rank in enumerate(sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))):
        for _ in range(draw(st.integers(1, 3))):
            steps = np.sort(np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=5)), np.int64))
            rows = st.lists(st.tuples(VALUES, VALUES), min_size=len(steps), max_size=len(steps))
            values = {name: np.array(draw(rows)).T for name in ("amax", "saturated")}
            made.append(RankRows(rank, order, steps, steps.astype("datetime64[us]"), values))
    return made


def by_hand(parts: list[RankRows], name: str) -> dict[int, list[float]]:
    """For each step and rank choose the last row of the lowest order, then merge the ranks.

    Rows without any observed value are ignored.
    """
    chosen: dict[tuple[int, int], tuple[int, np.ndarray[tuple[int], np.dtype[np.float64]]]] = {}
    for part in parts:
        for i, step in enumerate(part.steps.tolist()):
            if all(np.isnan(values[:, i]).all() for values in part.values.values()):
                continue
            known = chosen.get((step, part.rank))
            if known is None or part.order <= known[0]:
                chosen[step, part.rank] = (part.order, part.values[name][:, i])
    merged: dict[int, list[float]] = {}
    for step in sorted({step for step, _ in chosen}):
        rows = np.array([row for (at, _), (_, row) in chosen.items() if at == step])
        merged[step] = []
        for column in rows.T:
            seen = column[~np.isnan(column)]
            value = math.nan if not len(seen) else seen.sum() if name in SUMMED else seen.max()
            merged[step].append(float(value))
    return merged


def test_it_works() -> None:
    steps = np.array([1, 2])
    first = RankRows(0, 0, steps, steps.astype("datetime64[us]"), {"saturated": np.array([[1.0, 2.0]])})
    second = RankRows(1, 1, steps[1:], steps[1:].astype("datetime64[us]"), {"saturated": np.array([[40.0]])})
    merged = across_ranks([first, second])
    assert merged is not None
    assert merged.values["saturated"].tolist() == [[1.0, 42.0]]
    assert first_of_each_step([second, first]).values["saturated"].tolist() == [[1.0, 2.0]]
    assert across_ranks([]) is None


@given(parts())
def test_across_ranks_equals_a_plain_loop(received: list[RankRows]) -> None:
    merged = across_ranks(received)
    assert merged is not None
    observed = np.any([~np.isnan(values).all(axis=0) for values in merged.values.values()], axis=0)
    for name in ("amax", "saturated"):
        expected = by_hand(received, name)
        assert merged.steps[observed].tolist() == list(expected)
        values = np.array(list(expected.values())).reshape(-1, 2)
        np.testing.assert_array_equal(merged.values[name][:, observed].T, values)
    np.testing.assert_array_equal(merged.times.astype(np.int64), merged.steps)
    assert (np.diff(merged.steps) > 0).all()


@given(parts())
def test_first_of_each_step_chooses_the_lowest_order(received: list[RankRows]) -> None:
    merged = first_of_each_step(received)
    assert merged.steps.tolist() == sorted({step for part in received for step in part.steps.tolist()})
    for step, row in zip(merged.steps, merged.values["amax"].T, strict=True):
        lowest = min(part.order for part in received if step in part.steps)
        last = [
            part.values["amax"][:, i]
            for part in received
            if part.order == lowest
            for i in np.flatnonzero(part.steps == step)
        ]
        np.testing.assert_array_equal(row, last[-1])


@pytest.mark.parametrize("name", DERIVED)
def test_rates_are_ratios_of_sums(name: str) -> None:
    values = {source: np.array([[3.0, 0.0]]) for source in sources(name)}
    values[sources(name)[-1]] = np.array([[12.0, 0.0]])
    terms = len(sources(name)) - 1
    np.testing.assert_array_equal(derive(name, values), [[3.0 * terms / 12.0, math.nan]])


def test_the_smallest_block_scale_is_the_smallest_of_the_ranks() -> None:
    times = np.zeros(1, "datetime64[us]")
    parts = [
        RankRows(
            rank, rank, np.array([5]), times, {name: np.array([value]) for name in ("scale_min", "scale_max")}
        )
        for rank, value in enumerate((4.0, 2.0, 8.0))
    ]
    merged = across_ranks(parts)
    assert merged is not None
    assert (merged.values["scale_min"][0], merged.values["scale_max"][0]) == (2.0, 8.0)


def test_a_stored_statistic_derives_from_itself() -> None:
    assert sources("amax") == ("amax",)
    values = np.array([[1.0]])
    assert derive("amax", {"amax": values}) is values


def hashes(rank: int, order: int, values: dict[int, float]) -> RankRows:
    steps = np.array(list(values), np.int64)
    column = np.array(list(values.values()))
    return RankRows(rank, order, steps, steps.astype("datetime64[us]"), {"data_hash": column})


def test_hashes_of_batches_add_up_exactly() -> None:
    large = float(DATA_HASH_MODULUS - 1)
    parts = [
        hashes(1, 1, {1: large, 2: 5.0, 3: 1.0}),
        hashes(0, 0, {1: large, 2: 1.0}),
        hashes(2, 2, {1: 4, 2: 0}),
    ]
    merged = data_hash_across_ranks(parts)
    # In float64, 2 * (2**53 - 1) + 4 would not be exact. Step 3 is not known of every rank.
    assert merged.steps.tolist() == [1, 2]
    assert merged.values["data_hash"].tolist() == [(2 * (DATA_HASH_MODULUS - 1) + 4) % DATA_HASH_MODULUS, 6.0]


def test_hashes_of_one_rank_stay() -> None:
    merged = data_hash_across_ranks([hashes(0, 0, {1: 3.0, 2: math.nan}), hashes(0, 1, {1: 9.0, 4: 7.0})])
    assert dict(zip(merged.steps.tolist(), merged.values["data_hash"].tolist(), strict=True)) == {
        1: 3.0,
        4: 7.0,
    }
