"""Change-points: position, interval, and none where there is none."""

from __future__ import annotations

import numpy as np

from fp8scope_dashboard.diagnosis.change_points import change_point, change_points


def test_finds_a_step_exactly() -> None:
    change = change_point(np.array([0.0] * 10 + [1.0] * 6))
    assert change is not None
    assert (change.index, change.low, change.high, change.before, change.after) == (10, 10, 10, 0.0, 1.0)


def test_constant_and_short_series_have_none() -> None:
    assert change_point(np.ones(40)) is None
    assert change_point(np.array([0.0, 0.0, 1.0, 1.0])) is None


def test_noise_alone_has_none() -> None:
    chance = np.random.default_rng(0)
    alarms = sum(change_point(chance.normal(size=60)) is not None for _ in range(400))
    # The penalty of 3 log n bounds the log likelihood ratio far in its tail.
    assert alarms <= 4


def test_the_interval_covers_the_true_position() -> None:
    chance = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        change = change_point(chance.normal(size=100) + np.where(np.arange(100) >= 60, 1.5, 0.0))
        covered += change is not None and change.low <= 60 <= change.high
    assert covered >= 0.93 * 300


def test_several_changes_in_order() -> None:
    values = np.concatenate([np.zeros(20), np.full(15, 2.0), np.full(20, -1.0)])
    assert [change.index for change in change_points(values)] == [20, 35]
