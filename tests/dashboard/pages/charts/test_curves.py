"""The figure of curves over steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.marks import MAX_MARKS, Mark
from fp8scope_dashboard.pages.charts.theme import THEMES

LIGHT = THEMES["light"]


def curve(y: list[float], **fields: Any) -> Curve:
    defaults: dict[str, Any] = {"name": "a run", "arm": "FP8", "slot": "fp8-1"}
    return Curve(x=np.arange(len(y), dtype=float), y=np.array(y, dtype=float), **(defaults | fields))


def traces_named(figure: go.Figure, text: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name and text in trace.name]


def test_it_works() -> None:
    figure = curves_figure([curve([3.0, 2.0, 1.0])], LIGHT, y_range=(0.5, 3.5))
    (line,) = [trace for trace in figure.data if trace.name == "a run"]
    assert list(line.y) == [3.0, 2.0, 1.0]
    assert line.line.color == "rgba(189,73,6,1)"
    assert figure.layout.yaxis.range == (0.5, 3.5)


def test_marks_values_that_are_not_finite_at_their_step() -> None:
    figure = curves_figure([curve([2.0, np.nan, 2.0, np.inf, np.inf, np.inf, 2.0])], LIGHT)
    (crosses,) = traces_named(figure, "not finite")
    assert [x for x in crosses.x if x is not None] == [1.0, 1.0, 3.0, 5.0]
    assert crosses.text[0] == "NaN" and crosses.text[3] == "infinite"
    assert crosses.yaxis == "y2" and "x" in crosses.marker.symbol


def test_marks_values_outside_the_range_with_their_value() -> None:
    figure = curves_figure([curve([2.0, 500.0, 2.0, -7.0])], LIGHT, y_range=(1.0, 3.0))
    (above,), (below,) = traces_named(figure, "above the chart"), traces_named(figure, "below the chart")
    assert above.x[0] == 1.0 and above.text[0] == "500"
    assert below.x[0] == 3.0 and below.text[0] == "-7"


def test_does_not_mark_ordinary_values() -> None:
    figure = curves_figure([curve([2.0, 2.5])], LIGHT, y_range=(1.0, 3.0))
    assert not traces_named(figure, "not finite") and not traces_named(figure, "the chart")


def test_limits_the_number_of_marks() -> None:
    wild = np.where(np.arange(10_000) % 2, np.nan, 2.0).tolist()
    (crosses,) = traces_named(curves_figure([curve(wild)], LIGHT), "not finite")
    assert len(crosses.x) <= 2 * MAX_MARKS


def test_seeds_of_an_arm_share_colour_and_legend() -> None:
    seeds = [curve([2.0, 1.0], name=f"seed {i}", arm="BF16", slot="bf16", quiet=True) for i in range(3)]
    figure = curves_figure([*seeds, curve([2.0, 1.5])], LIGHT)
    assert [trace.name for trace in figure.data if trace.showlegend is not False] == ["BF16", "FP8"]
    assert figure.layout.showlegend


def test_one_arm_needs_no_legend_and_no_dash() -> None:
    figure = curves_figure([curve([2.0, 1.0], slot="fp8-2")], LIGHT)
    assert not figure.layout.showlegend
    assert {trace.line.dash for trace in figure.data if trace.mode == "lines"} == {"solid"}


def test_two_fp8_arms_differ_by_more_than_colour() -> None:
    first, second = curve([2.0, 1.0], arm="A"), curve([2.0, 1.0], arm="B", slot="fp8-2")
    figure = curves_figure([first, second], LIGHT)
    assert {trace.line.dash for trace in figure.data if trace.showlegend is not False} == {"solid", "dash"}


def test_a_log_axis_leaves_out_zero_and_negative_values() -> None:
    figure = curves_figure([curve([100.0, 0.0, -1.0, 1.0])], LIGHT, log=True)
    (line,) = [trace for trace in figure.data if trace.name == "a run"]
    assert np.isnan(line.y[[1, 2]]).all()
    assert figure.layout.yaxis.type == "log" and figure.layout.yaxis2.type == "linear"


def test_a_single_point_is_drawn_as_a_marker() -> None:
    assert curves_figure([curve([2.0])], LIGHT).data[0].mode == "markers"


def test_the_smooth_line_is_drawn_over_the_raw_one() -> None:
    both = curve([2.0, 1.0], smooth_x=np.arange(2.0), smooth_y=np.array([1.9, 1.1]))
    raw, smooth, *_ = curves_figure([both], LIGHT).data
    assert raw.name == "a run, raw" and raw.hoverinfo == "skip"
    assert list(smooth.y) == [1.9, 1.1] and smooth.line.width > raw.line.width


def test_alerts_are_marked() -> None:
    figure = curves_figure(
        [curve([2.0, 1.0])], LIGHT, marks=[Mark(x=1.0, text="Loss spike <from> step 1", severe=True)]
    )
    (diamonds,) = traces_named(figure, "alert")
    assert diamonds.text == ("Loss spike &lt;from&gt; step 1",)
    assert diamonds.marker.color == (LIGHT.danger,)


def test_escapes_names() -> None:
    figure = curves_figure([curve([1.0, 2.0], name="<b>bold</b>")], LIGHT)
    assert "&lt;b&gt;" in figure.data[0].hovertemplate and "<b>" not in figure.data[0].hovertemplate


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
@pytest.mark.parametrize("compact", [True, False])
def test_every_variant_becomes_json(theme: Any, compact: bool) -> None:
    figure = curves_figure([curve([1.0, np.nan, np.inf])], theme, compact=compact, y_range=(0, 2))
    assert '"NaN"' in figure.to_json()
    # Plotly checks what a plain figure does not, and writes the same.
    checked = figure.editable()
    assert go.Figure(checked.to_dict()).to_plotly_json().keys() == checked.to_plotly_json().keys()
    assert json.loads(checked.to_json(validate=False)) == json.loads(figure.to_json())
