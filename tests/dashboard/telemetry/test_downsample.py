"""Thinning a line keeps its spikes, extremes and gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.telemetry.downsample import MIN_POINTS, keep

NONFINITE = [np.nan, np.inf, -np.inf]


def line(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    return 5 * np.exp(-np.arange(count) / count) + 0.05 * rng.standard_normal(count)


def test_it_works() -> None:
    steps, values = np.arange(100_000), line(100_000, 0)
    kept = keep(steps, values, 2000)
    assert 1500 <= len(kept) <= 2000
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, 99_999)


@given(st.integers(0, 5000), st.integers(MIN_POINTS, 600), st.integers(0, 2**32 - 1))
def test_never_returns_more_points_than_requested(count: int, points: int, seed: int) -> None:
    kept = keep(np.arange(count), line(count, seed), points)
    assert len(kept) <= max(points, min(count, points))
    assert len(np.unique(kept)) == len(kept)
    if count <= points:
        assert kept.tolist() == list(range(count))
    elif count:
        assert (kept[0], kept[-1]) == (0, count - 1)


@given(st.data(), st.integers(2000, 20_000), st.integers(200, 2000))
def test_keeps_every_spike(data: st.DataObject, count: int, points: int) -> None:
    """Up to one spike of one step a bucket, up or down: each is kept."""
    buckets = points // 4
    values = line(count, data.draw(st.integers(0, 2**32 - 1)))
    chosen = data.draw(st.lists(st.integers(0, buckets - 1), max_size=50, unique=True))
    spikes = np.array(
        [b * count // buckets + data.draw(st.integers(1, max(1, count // buckets - 2))) for b in chosen], int
    )
    up = data.draw(st.booleans())
    values[spikes] = 50.0 if up else -50.0
    kept = keep(np.arange(count), values, points)
    assert set(spikes) <= set(kept)


@given(st.integers(200, 5000), st.integers(40, 400), st.integers(0, 2**32 - 1))
def test_keeps_the_extremes(count: int, points: int, seed: int) -> None:
    """The kept points have the same minimum and maximum as all points."""
    values = np.random.default_rng(seed).standard_normal(count)
    kept = keep(np.arange(count), values, points)
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


@given(st.data(), st.integers(500, 5000))
def test_keeps_nonfinite_values_visible(data: st.DataObject, count: int) -> None:
    values = line(count, 1)
    position = data.draw(st.integers(0, count - 1))
    values[position] = data.draw(st.sampled_from(NONFINITE))
    kept = keep(np.arange(count), values, 100)
    assert position in kept
    assert len(kept) <= 100


@given(st.integers(2, 4000), st.sampled_from(NONFINITE))
def test_keeps_the_first_nan_of_a_run_that_ends_in_nan(begin: int, nonfinite: float) -> None:
    values = line(5000, 2)
    values[begin:] = nonfinite
    kept = keep(np.arange(5000), values, 200)
    assert {begin - 1, begin, 4999} <= set(kept) | {begin - 1}
    assert begin in kept
    assert len(kept) <= 200


def test_keeps_finite_values_and_nan_if_every_second_value_is_nan() -> None:
    values = line(10_000, 3)
    values[::2] = np.nan
    kept = keep(np.arange(10_000), values, 100)
    assert len(kept) <= 100
    assert np.isnan(values[kept]).sum() >= 40
    assert np.isfinite(values[kept]).sum() >= 40


def test_keeps_both_ends_if_all_values_are_nan() -> None:
    kept = keep(np.arange(1000), np.full(1000, np.nan), 100)
    assert (kept[0], kept[-1]) == (0, 999)


def test_keeps_the_last_point_after_a_large_gap() -> None:
    steps = np.concatenate([np.arange(1000), [10**9]])
    assert 1000 in keep(steps, line(1001, 4), 50)


def test_rejects_too_few_points() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        keep(np.arange(10), np.zeros(10), 7)


def test_keeps_many_close_spikes() -> None:
    random = np.random.default_rng(5)
    values = random.random(100_000)
    spikes = np.sort(random.choice(np.arange(1, 99_999), 50, replace=False))
    values[spikes] = 10.0 + random.random(50)
    kept = keep(np.arange(100_000), values, 1_200)
    assert len(kept) <= 1_200
    assert set(spikes.tolist()) <= set(kept.tolist())
