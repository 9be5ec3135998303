"""Curves over steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from fp8scope_dashboard.pages.figures.curves import MOST_MARKS, Curve, Mark, curves_figure
from fp8scope_dashboard.pages.figures.theme import THEMES

LIGHT = THEMES["light"]


def curve(y: list[float], **fields: Any) -> Curve:
    known: dict[str, Any] = {"name": "a run", "arm": "FP8", "slot": "fp8-1"}
    return Curve(x=np.arange(len(y), dtype=float), y=np.array(y, dtype=float), **(known | fields))


def marks(figure: go.Figure, what: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name and what in trace.name]


def test_it_works() -> None:
    figure = curves_figure([curve([3.0, 2.0, 1.0])], LIGHT, y_range=(0.5, 3.5))
    (line,) = [trace for trace in figure.data if trace.name == "a run"]
    assert list(line.y) == [3.0, 2.0, 1.0]
    assert line.line.color == "rgba(201,80,10,1)"
    assert figure.layout.yaxis.range == (0.5, 3.5)


def test_what_is_not_finite_is_marked_where_it_is() -> None:
    figure = curves_figure([curve([2.0, np.nan, 2.0, np.inf, np.inf, np.inf, 2.0])], LIGHT)
    (crosses,) = marks(figure, "not finite")
    assert [x for x in crosses.x if x is not None] == [1.0, 1.0, 3.0, 5.0]
    assert crosses.text[0] == "NaN" and crosses.text[3] == "infinite"
    assert crosses.yaxis == "y2" and "x" in crosses.marker.symbol


def test_what_the_range_cuts_off_is_marked_with_its_value() -> None:
    figure = curves_figure([curve([2.0, 500.0, 2.0, -7.0])], LIGHT, y_range=(1.0, 3.0))
    (above,), (below,) = marks(figure, "above the chart"), marks(figure, "below the chart")
    assert above.x[0] == 1.0 and above.text[0] == "500"
    assert below.x[0] == 3.0 and below.text[0] == "-7"


def test_nothing_strange_is_not_marked() -> None:
    figure = curves_figure([curve([2.0, 2.5])], LIGHT, y_range=(1.0, 3.0))
    assert not marks(figure, "not finite") and not marks(figure, "the chart")


def test_marks_are_bounded() -> None:
    wild = np.where(np.arange(10_000) % 2, np.nan, 2.0).tolist()
    (crosses,) = marks(curves_figure([curve(wild)], LIGHT), "not finite")
    assert len(crosses.x) <= 2 * MOST_MARKS


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
    one, two = curve([2.0, 1.0], arm="A"), curve([2.0, 1.0], arm="B", slot="fp8-2")
    figure = curves_figure([one, two], LIGHT)
    assert {trace.line.dash for trace in figure.data if trace.showlegend is not False} == {"solid", "dash"}


def test_a_log_axis_leaves_out_what_has_no_place_on_it() -> None:
    figure = curves_figure([curve([100.0, 0.0, -1.0, 1.0])], LIGHT, log=True)
    (line,) = [trace for trace in figure.data if trace.name == "a run"]
    assert np.isnan(line.y[[1, 2]]).all()
    assert figure.layout.yaxis.type == "log" and figure.layout.yaxis2.type == "linear"


def test_a_single_point_is_seen() -> None:
    assert curves_figure([curve([2.0])], LIGHT).data[0].mode == "markers"


def test_the_smooth_line_stands_before_the_raw_one() -> None:
    both = curve([2.0, 1.0], smooth_x=np.arange(2.0), smooth_y=np.array([1.9, 1.1]))
    raw, smooth, *_ = curves_figure([both], LIGHT).data
    assert raw.name == "a run, raw" and raw.hoverinfo == "skip"
    assert list(smooth.y) == [1.9, 1.1] and smooth.line.width > raw.line.width


def test_alerts_are_marked() -> None:
    figure = curves_figure(
        [curve([2.0, 1.0])], LIGHT, marks=[Mark(1.0, "Loss spike <from> step 1", severe=True)]
    )
    (diamonds,) = marks(figure, "alert")
    assert diamonds.text == ("Loss spike &lt;from&gt; step 1",)
    assert diamonds.marker.color == (LIGHT.danger,)


def test_names_are_text_not_markup() -> None:
    figure = curves_figure([curve([1.0, 2.0], name="<b>bold</b>")], LIGHT)
    assert "&lt;b&gt;" in figure.data[0].hovertemplate and "<b>" not in figure.data[0].hovertemplate


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
@pytest.mark.parametrize("compact", [True, False])
def test_every_form_becomes_json(theme: Any, compact: bool) -> None:
    figure = curves_figure([curve([1.0, np.nan, np.inf])], theme, compact=compact, y_range=(0, 2))
    assert '"NaN"' in figure.to_json()
