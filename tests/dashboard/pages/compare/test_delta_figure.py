"""Figures of the loss difference over a run, and of scores with their intervals."""

from __future__ import annotations

import numpy as np

from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.pages.compare.delta_figure import DeltaCurve, delta_figure
from fp8scope_dashboard.pages.scores.checkpoint_figures import (
    CheckpointPoint,
    Zone,
    differences_figure,
    scores_figure,
)

LIGHT = THEMES["light"]
MARGIN = 0.0025


def delta(values: list[float], **fields: object) -> DeltaCurve:
    array = np.array(values)
    defaults = {"name": "fp8", "slot": "fp8-1", "tolerance": 0.01}
    return DeltaCurve(
        x=np.arange(len(values), dtype=float),
        delta=array,
        low=array - 0.001,
        high=array + 0.001,
        **(defaults | fields),  # type: ignore[arg-type]
    )


def test_it_works() -> None:
    figure = delta_figure([delta([0.0, 0.001, 0.002])], MARGIN, LIGHT)
    (line,) = [trace for trace in figure.data if trace.name == "fp8" and trace.mode == "lines"]
    assert line.y.tolist() == [0.0, 0.001, 0.002]
    zone = next(shape for shape in figure.layout.shapes if shape.type == "rect")
    assert (zone.y0, zone.y1) == (-MARGIN, MARGIN)


def test_the_tolerance_is_drawn_on_both_sides() -> None:
    figure = delta_figure([delta([0.0] * 5)], MARGIN, LIGHT)
    assert {-0.01, 0.01} <= {shape.y0 for shape in figure.layout.shapes if shape.type == "line"}
    low, high = figure.layout.yaxis.range
    assert low < -0.01 and high > 0.01


def test_values_outside_the_range_are_cut_off_and_marked() -> None:
    figure = delta_figure([delta([0.0, 0.0, 5.0, 6.0, -3.0])], MARGIN, LIGHT)
    assert figure.layout.yaxis.range[1] <= 0.05
    marks = {trace.marker.symbol: trace for trace in figure.data if trace.mode == "markers"}
    assert marks["triangle-up"].x.tolist() == [2.0]
    assert marks["triangle-down"].x.tolist() == [4.0]


def test_hover_texts_have_the_unit_of_the_difference() -> None:
    for nats, unit in ((True, "+.3~g"), (False, "+.3%")):
        figure = delta_figure([delta([0.0, 0.001])], MARGIN, LIGHT, nats=nats)
        line = next(trace for trace in figure.data if trace.name == "fp8" and trace.mode == "lines")
        assert unit in line.hovertemplate


def test_runs_of_one_name_are_drawn_apart() -> None:
    points = [score(100, "twin", 0.5, run="a"), score(100, "twin", 0.9, run="b", slot="fp8-2")]
    figure = scores_figure(points, [], LIGHT, y_title="accuracy")
    assert [trace.y for trace in figure.data] == [(0.5,), (0.9,)]
    assert len({trace.marker.color for trace in figure.data}) == 2


def test_the_judged_window_is_shaded() -> None:
    figure = delta_figure([delta([0.0] * 5, window=(3.0, 4.0))], MARGIN, LIGHT)
    assert (3.0, 4.0) in {(shape.x0, shape.x1) for shape in figure.layout.shapes}


def test_a_run_without_tolerance_can_be_drawn() -> None:
    assert delta_figure([delta([0.0, 1.0], tolerance=None)], MARGIN, LIGHT, compact=True).data


def score(step: int, name: str, value: float, **fields: object) -> CheckpointPoint:
    defaults = {"arm": "FP8", "slot": "fp8-1", "low": value - 0.1, "high": value + 0.2}
    return CheckpointPoint(step=step, name=name, value=value, **(defaults | fields))  # type: ignore[arg-type]


def test_scores_of_a_checkpoint_are_drawn_side_by_side() -> None:
    points = [score(100, "a", 0.4), score(100, "b", 0.5), score(300, "a", 0.6)]
    figure = scores_figure(points, [], LIGHT, y_title="accuracy")
    first, second = figure.data
    assert figure.layout.xaxis.ticktext == ("100", "300")
    assert -0.5 < first.x[0] < second.x[0] < 0.5 < first.x[1] < 1.5
    np.testing.assert_allclose(first.error_y.array, [0.2, 0.2])
    np.testing.assert_allclose(first.error_y.arrayminus, [0.1, 0.1])


def test_seeds_share_a_legend_entry() -> None:
    points = [score(1, f"seed {i}", 0.5, arm="BF16", slot="bf16") for i in range(3)]
    figure = scores_figure(points, [], LIGHT, y_title="accuracy")
    assert [trace.showlegend for trace in figure.data] == [True, False, False]


def test_the_axis_includes_bands_and_whiskers() -> None:
    figure = scores_figure([score(1, "a", 0.5)], [Zone(1, 0.1, 0.45)], LIGHT, y_title="accuracy")
    low, high = figure.layout.yaxis.range
    assert low < 0.1 and high > 0.7
    (band,) = figure.layout.shapes
    assert (band.y0, band.y1) == (0.1, 0.45)


def test_differences_are_drawn_over_the_margin() -> None:
    margins = [Zone(1, -0.02, 0.02)]
    figure = differences_figure([score(1, "a", -0.1)], margins, LIGHT, in_percent=True)
    zone, zero = figure.layout.shapes
    assert (zone.y0, zone.y1, zero.y0) == (-2.0, 2.0, 0)
    # Shares in per cent differ by percentage points.
    assert "+.2~f" in figure.data[0].hovertemplate and figure.layout.yaxis.tickformat == ".2~f"
    low, high = figure.layout.yaxis.range
    assert low < -20.0 and high > 10.0


def test_a_score_without_interval_is_a_dot() -> None:
    (drawn,) = scores_figure([score(1, "a", 0.5, low=None, high=None)], [], LIGHT, y_title="x").data
    assert list(drawn.error_y.array) == [0.0]


def test_escapes_names() -> None:
    (drawn,) = scores_figure([score(1, "<i>a</i>", 0.5)], [], LIGHT, y_title="x").data
    assert "<i>" not in drawn.hovertemplate


def test_the_chart_contains_where_curves_end() -> None:
    curves = [delta([0.0] * 40), delta([0.0] * 20 + [0.2] * 20), delta([-0.09] * 40)]
    low, high = delta_figure(curves, MARGIN, LIGHT).layout.yaxis.range
    assert low < -0.09 and high > 0.2
    low, high = delta_figure([delta([0.0] * 20 + [5.0] * 20)], MARGIN, LIGHT).layout.yaxis.range
    assert high <= 0.4, "one that is far away leaves the others visible"
