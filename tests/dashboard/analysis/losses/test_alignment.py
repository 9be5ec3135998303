"""Aligning curves on a common axis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.analysis.losses.alignment import LossCurve, align, clean


def steps_only(first: int, last: int, every: int = 1) -> LossCurve:
    steps = np.arange(first, last + 1, every)
    return LossCurve(steps=steps, losses=steps.astype(float))


def test_it_works() -> None:
    aligned = align([steps_only(0, 100), steps_only(50, 200)])
    assert aligned.axis == "steps" and aligned.shared and aligned.paired == "steps"
    assert aligned.x[0] == 50 and aligned.x[-1] == 100
    assert np.array_equal(aligned.losses[0], aligned.losses[1])


def test_aligns_on_tokens_if_all_runs_have_them() -> None:
    with_tokens = [
        LossCurve(steps=np.arange(5), losses=np.ones(5), tokens=10.0 * np.arange(5.0)) for _ in range(2)
    ]
    assert align(with_tokens).axis == "tokens"
    assert align([*with_tokens, steps_only(0, 4)]).axis == "steps"
    with pytest.raises(ValueError, match="align on steps"):
        steps_only(0, 4).on("tokens")


def test_averages_over_the_intervals_of_the_sparsest_run() -> None:
    fine = LossCurve(steps=np.arange(100), losses=np.arange(100.0), tokens=np.arange(100.0))
    coarse = LossCurve(steps=np.arange(11), losses=np.arange(11.0), tokens=8.9 * np.arange(11.0))
    aligned = align([fine, coarse])
    assert not aligned.shared and aligned.paired == "no" and np.array_equal(aligned.x, 8.9 * np.arange(11.0))
    # The interval (8.9, 17.8] contains the points 9 to 17.
    assert aligned.losses[0, 2] == pytest.approx(13.0) and aligned.losses[1, 2] == 2.0


def test_few_shared_points_are_not_paired() -> None:
    every_third, every_fourth = steps_only(0, 120, 3), steps_only(0, 120, 4)
    aligned = align([every_third, every_fourth])
    assert not aligned.shared and len(aligned.x) == 31


def test_logging_every_tenth_step_pairs_with_every_step() -> None:
    aligned = align([steps_only(0, 100), steps_only(0, 100, 10)])
    assert aligned.shared and len(aligned.x) == 11


def test_curves_without_a_common_range_give_no_points() -> None:
    assert align([steps_only(0, 10), steps_only(20, 30)]).x.size == 0
    assert align(
        [steps_only(0, 10), LossCurve(steps=np.empty(0, np.int64), losses=np.empty(0))]
    ).losses.shape == (2, 0)


def test_a_nan_stays_where_it_was_logged() -> None:
    fine = LossCurve(steps=np.arange(100), losses=np.where(np.arange(100) == 15, math.nan, 1.0))
    aligned = align([fine, steps_only(0, 99, 9)])
    assert aligned.shared
    binned = align([fine, LossCurve(steps=np.arange(0, 95, 2) + 3, losses=np.ones(48)), steps_only(2, 90, 8)])
    assert np.isnan(binned.losses[0]).sum() == 1


def test_cleaning_sorts_steps_and_keeps_the_first_duplicate() -> None:
    curve = clean(LossCurve(steps=np.array([2, 0, 1, 1]), losses=np.array([20.0, 0.0, 10.0, 11.0])))
    assert curve.steps.tolist() == [0, 1, 2] and curve.losses.tolist() == [0.0, 10.0, 20.0]


@pytest.mark.parametrize("tokens", [[0, 1, 1], [0, 2, 1], [0, math.nan, 2], [0, 1, math.inf]])
def test_ignores_tokens_that_do_not_increase(tokens: list[float]) -> None:
    assert (
        clean(LossCurve(steps=np.arange(3), losses=np.ones(3), tokens=np.array(tokens, dtype=float))).tokens
        is None
    )


@given(st.lists(st.sets(st.integers(0, 50), min_size=1), min_size=1, max_size=4))
def test_aligned_points_ascend_within_the_common_range(logged: list[set[int]]) -> None:
    curves = [LossCurve(steps=np.array(sorted(steps)), losses=np.ones(len(steps))) for steps in logged]
    aligned = align(curves)
    assert aligned.losses.shape == (len(curves), len(aligned.x))
    assert np.isfinite(aligned.losses).all() and (np.diff(aligned.x) > 0).all()
    if len(aligned.x):
        first, last = max(min(steps) for steps in logged), min(max(steps) for steps in logged)
        assert first <= aligned.x[0] <= aligned.x[-1] <= last


def test_aligning_no_curve_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        align([])


@pytest.mark.parametrize(
    ("hashes", "pairing"),
    [((7.0, 7.0), "data"), ((7.0, 8.0), "no"), ((7.0, None), "steps"), ((None, None), "steps")],
)
def test_runs_are_paired_by_the_hashes_of_their_batches(
    hashes: tuple[float | None, float | None], pairing: str
) -> None:
    """Shared steps alone do not show that the runs saw the same data."""
    steps = np.arange(30)
    curves = [
        LossCurve(
            steps=steps,
            losses=np.ones(30),
            tokens=None,
            data_hash=None if first is None else np.asarray(steps * 1e15 + first, np.float64),
        )
        for first in hashes
    ]
    assert align(curves).paired == pairing
    unknown = LossCurve(steps=steps, losses=np.ones(30), tokens=None, data_hash=np.full(30, math.nan))
    assert align([unknown, curves[0]]).paired == "steps"
