"""Sparklines: small images of the loss of a run."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from fp8scope_dashboard.pages.charts.sparkline import BROKEN, COLOURS, HEIGHT, WIDTH, sparkline

SVG = "{http://www.w3.org/2000/svg}"


def lines(text: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(text).findall(f"{SVG}polyline")


def test_it_works() -> None:
    (line,) = lines(sparkline(np.arange(5.0), np.array([5.0, 4.0, 3.0, 2.5, 2.4]), "bf16"))
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(points) == 5 and line.attrib["stroke"] == COLOURS["bf16"]
    assert points[0][1] < points[-1][1], "a falling loss is drawn downwards"
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_a_gap_breaks_the_line_and_is_marked() -> None:
    text = sparkline(np.arange(5.0), np.array([5.0, 4.0, np.nan, 2.5, 2.4]), "fp8-1")
    assert len(lines(text)) == 2 and BROKEN in text


def test_a_diverging_run_is_clipped_at_the_edge() -> None:
    y = np.concatenate([np.linspace(5, 2, 50), np.geomspace(2, 1e9, 20)])
    (line,) = lines(sparkline(np.arange(70.0), y, "fp8-1"))
    assert all(0 <= float(pair.split(",")[1]) <= HEIGHT for pair in line.attrib["points"].split())


def test_without_values_the_image_is_empty() -> None:
    assert lines(sparkline(np.zeros(0), np.zeros(0), "other")) == []
    assert lines(sparkline(np.arange(3.0), np.full(3, np.nan), "other")) == []


def test_one_point_can_be_drawn() -> None:
    assert len(lines(sparkline(np.array([7.0]), np.array([2.0]), "other"))) == 1
