"""The trend of a difference, and whether it moves."""

from __future__ import annotations

import numpy as np
import pytest

from fp8scope_dashboard.analysis.losses.sample_size import MOVING_BLOCKS, movement, trend
from fp8scope_dashboard.statistics.student import upper_quantile


def test_it_works() -> None:
    """A line rises by its slope times the distance of the first block's centre to the last one's."""
    line = trend(np.arange(1200.0) / 1200.0)
    assert line.change == pytest.approx(1.0 - 1.0 / MOVING_BLOCKS)
    assert line.error == pytest.approx(0.0, abs=1e-12)
    assert line.freedom == MOVING_BLOCKS - 2


def test_its_interval_covers_the_slope_in_95_of_100_series() -> None:
    random, slope = np.random.default_rng(0), 0.5 * np.arange(240) / 240
    trends = [trend(slope + random.normal(size=240)) for _ in range(1000)]
    reach = upper_quantile(0.025, trends[0].freedom)
    true = 0.5 * (1.0 - 1.0 / MOVING_BLOCKS)
    covered = sum(abs(estimate.change - true) <= reach * estimate.error for estimate in trends)
    assert covered == pytest.approx(950, abs=35)


def test_only_a_trend_of_the_recent_half_moves() -> None:
    x, random = np.arange(1.0, 481.0), np.random.default_rng(1)
    rising = np.where(x > 240, (x - 240) / 240, 0.0)
    moved = movement(x, rising + random.normal(size=480) * 0.01)
    assert moved is not None
    assert moved.since == 241.0
    assert moved.change == pytest.approx(1.0 - 1.0 / MOVING_BLOCKS, abs=0.05)
    # By a test at 1 %: what fell in the first half does not move, in nearly all series.
    early = rising[::-1]
    movements = [movement(x, early + random.normal(size=480) * 0.01) for _ in range(1000)]
    assert sum(result is not None for result in movements) <= 25
    assert movement(x[:40], rising[:40]) is None
