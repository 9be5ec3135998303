"""Curves and bars in rows of tables."""

from __future__ import annotations

import re

import numpy as np

from fp8scope_dashboard.pages.charts.interval_bar import interval_bar
from fp8scope_dashboard.pages.charts.sparkline import ROW_HEIGHT, ROW_WIDTH, row_sparkline

PLACES = {"point": 60.0, "low": 55.0, "high": 65.0, "off_scale": 0, "detectable": 40.0}


def points_of(svg: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]


def test_it_works() -> None:
    points = points_of(row_sparkline(np.array([0.0, 1.0, 0.5]), (0.0, 1.0)))
    assert points == [(0.0, ROW_HEIGHT - 1.0), (ROW_WIDTH / 2, 1.0), (ROW_WIDTH, ROW_HEIGHT / 2)]


def test_a_curve_of_sampled_values_has_no_gaps() -> None:
    values = np.array([np.nan, 0.2, np.nan, np.nan, 0.8, np.nan])
    assert [x for x, _ in points_of(row_sparkline(values, (0.0, 1.0)))] == [24.0, 96.0]
    assert row_sparkline(np.full(4, np.nan), (0.0, 1.0)) == ""
    assert len(points_of(row_sparkline(np.array([3.0]), (3.0, 3.0)))) == 1


def test_a_bar_shows_the_difference_its_interval_and_what_could_be_seen() -> None:
    bar = interval_bar(PLACES, "fp8-1", "worse")
    assert 'cx="60.0%"' in bar and 'x1="55.0%" x2="65.0%"' in bar and 'x1="40.0%"' in bar
    assert "arm--fp8-1" in bar and "forest__svg--worse" in bar
    assert "forest__detectable" not in interval_bar(PLACES | {"detectable": None}, "fp8-1", "worse")


def test_a_difference_beyond_the_bar_is_an_arrow() -> None:
    right = interval_bar(PLACES | {"off_scale": 1}, "fp8-1", "better")
    left = interval_bar(PLACES | {"off_scale": -1}, "fp8-1", "worse")
    assert "▶" in right and "◀" in left and "<circle" not in left + right


def test_a_bar_escapes_what_it_is_given() -> None:
    assert "<script>" not in interval_bar(PLACES, '"><script>', "worse")
