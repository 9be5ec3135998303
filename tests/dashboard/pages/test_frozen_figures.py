"""Figures drawn as SVG on the server."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest

from fp8scope_dashboard.pages.figures.comparisons import DeltaCurve, delta_figure
from fp8scope_dashboard.pages.figures.curves import Curve, curves_figure
from fp8scope_dashboard.pages.figures.frozen.axes import Axis, label_of, nice_step
from fp8scope_dashboard.pages.figures.frozen.svg import WIDTH, figure_svg
from fp8scope_dashboard.pages.figures.tensors import TensorLines, heatmap_figure, tensor_figure
from fp8scope_dashboard.pages.figures.theme import THEMES

LIGHT = THEMES["light"]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(figure: go.Figure, label: str = "a chart") -> ElementTree.Element:
    """The figure as the browser would get it, drawn and parsed."""
    return ElementTree.fromstring(figure_svg(json.loads(figure.to_json(validate=False)), label))


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The points of each stroked path that has some."""
    found = []
    for path in root.iter(f"{SVG}path"):
        points = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d") or "")
        if path.get("fill") == "none" and len(points) > 2:
            found.append([(float(x), float(y)) for x, y in points])
    return found


def test_it_works() -> None:
    x = np.arange(100.0)
    root = drawn(curves_figure([Curve("run <1>", "FP8", "fp8-1", x, 5.0 - x / 50.0)], LIGHT, x_title="step"))
    assert root.get("viewBox", "").startswith(f"0 0 {WIDTH} ") and root.get("aria-label") == "a chart"
    (line,) = lines(root)
    assert len(line) == 100
    assert line[0][0] < line[-1][0] and line[0][1] < line[-1][1], "a falling loss falls"
    assert "step" in [text.text for text in root.iter(f"{SVG}text")]


def test_a_line_is_interrupted_at_nan() -> None:
    y = np.array([1.0, 2.0, np.nan, 3.0, 2.0])
    root = drawn(curves_figure([Curve("r", "FP8", "fp8-1", np.arange(5.0), y)], LIGHT))
    moves = [path.get("d", "").count("M") for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert 2 in moves


def test_a_log_axis_has_equal_decades() -> None:
    axis = Axis(-2.0, 2.0, 0.0, 400.0, log=True)
    assert axis.at([0.01, 1.0, 100.0]).tolist() == [0.0, 200.0, 400.0]
    assert np.isnan(axis.at([0.0, -1.0])).all()
    assert len(axis.ticks()) >= 3


def test_the_delta_has_its_band_and_its_margin() -> None:
    x = np.linspace(0.0, 10.0, 20)
    curve = DeltaCurve("r", "fp8-1", x, x * 0.0, x * 0.0 - 0.01, x * 0.0 + 0.01, 0.004)
    root = drawn(delta_figure([curve], 0.0025, LIGHT))
    zones = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill", "").startswith("rgba")]
    assert zones and any(path.get("fill", "").startswith("rgba") for path in root.iter(f"{SVG}path"))


def test_a_heat_map_is_an_image_with_names() -> None:
    values = np.array([[0.0, 1.0, np.nan], [0.5, 0.5, 0.5]])
    root = drawn(
        heatmap_figure(["a.input", "b.input"], np.array([0, 1, 2, 3]), values, "overflow_rate", LIGHT)
    )
    (image,) = root.iter(f"{SVG}image")
    assert image.get("href", "").startswith("data:image/png;base64,")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.index("a.input") < texts.index("b.input") and "100 %" in texts


def test_panels_below_each_other_do_not_overlap() -> None:
    steps = np.arange(50)
    series = {"amax": (steps, 2.0 + np.sin(steps)), "overflow_rate": (steps, np.full(50, 0.01))}
    figure = drawn(tensor_figure(TensorLines("t", "e4m3", series), LIGHT))
    upper, lower = (line for line in lines(figure) if len(line) == 50)
    assert max(y for _, y in upper) < min(y for _, y in lower)


@pytest.mark.parametrize(
    ("size", "step"), [(0.9, 1.0), (1.1, 2.0), (30.0, 50.0), (0.0, 1.0), (float("nan"), 1.0)]
)
def test_steps_of_ticks_are_round(size: float, step: float) -> None:
    assert nice_step(size) == step


def test_labels() -> None:
    assert label_of(0.0025, "+.2~%") == "+0.25 %" and label_of(-0.01, ".3~p") == "−1 %"
    assert label_of(200_000.0, "") == "200,000" and label_of(1e-7, "") == "1e−07"


def test_names_are_escaped() -> None:
    figure = go.Figure(go.Scatter(x=[0, 1, 2], y=[0, 1, 2], name="<script>", showlegend=True))
    figure.update_layout(showlegend=True, height=300)
    assert "<script" not in figure_svg(json.loads(figure.to_json()), '"><script>')
