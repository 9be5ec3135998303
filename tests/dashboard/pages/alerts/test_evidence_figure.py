"""The figure of the evidence of an alert."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from fp8scope_dashboard.pages.alerts.evidence_figure import evidence_figure
from fp8scope_dashboard.pages.charts.theme import THEMES

LOSS = {"name": "loss", "steps": [10, 11, 12, 13], "values": [2.0, 2.1, "NaN", "Infinity"]}
SEED = {"name": "bf16 seed 1", "steps": [10, 11, 12, 13], "values": [2.0, 2.0, 2.0, 2.0]}
TENSOR = {
    "tensor": "a.input",
    "name": "a.input overflow_rate",
    "steps": [10, 11, 12],
    "values": [0.0, 0.01, 0.02],
}


def draw(evidence: dict[str, Any], threshold: float | None = None) -> go.Figure | None:
    return evidence_figure(
        evidence, THEMES["light"], slot="fp8-1", onset=12, detected=13, threshold=threshold
    )


def test_it_works() -> None:
    figure = draw({"series": [LOSS], "baseline": [SEED]})
    assert figure is not None
    assert {"loss", "bf16 seed 1"} <= {trace.name for trace in figure.data}
    assert any("onset 12" in note.text for note in figure.layout.annotations)


def test_marks_a_loss_that_is_not_finite() -> None:
    figure = draw({"series": [LOSS]})
    assert figure is not None
    (crosses,) = [trace for trace in figure.data if "not finite" in (trace.name or "")]
    assert [x for x in crosses.x if x is not None] == [12.0, 13.0]


def test_draws_tensors_with_the_threshold_and_without_the_loss() -> None:
    figure = draw({"series": [TENSOR, LOSS], "tensors": []}, threshold=0.001)
    assert figure is not None
    assert "loss" not in {trace.name for trace in figure.data}
    assert 0.001 in {shape.y0 for shape in figure.layout.shapes}


def test_tensors_have_no_colour_of_an_arm_and_differ_in_dashes() -> None:
    other = {**TENSOR, "tensor": "b.input", "name": "b.input overflow_rate"}
    figure = draw({"series": [TENSOR, other]})
    assert figure is not None
    legend = [trace for trace in figure.data if trace.showlegend is not False]
    assert len({trace.line.dash for trace in legend}) == 2 == len(legend)
    arms = {THEMES["light"].arms[slot] for slot in ("bf16", "fp8-1", "fp8-2", "fp8-3")}
    assert not {trace.line.color for trace in legend} & arms


def test_the_axis_includes_a_threshold_above_all_values() -> None:
    figure = draw({"series": [TENSOR]}, threshold=0.5)
    assert figure is not None and figure.layout.yaxis.range[1] > 0.5


def test_without_series_there_is_no_figure() -> None:
    assert draw({}) is None
    assert draw({"series": [{"name": "loss", "steps": [], "values": []}]}) is None


def test_a_scalar_is_drawn_without_the_loss_and_with_its_threshold() -> None:
    norm = {"name": "grad_norm", "steps": [10, 11, 12], "values": [1.0, 1.1, 9.0]}
    figure = draw({"series": [norm, LOSS]}, threshold=4.0)
    assert figure is not None
    assert "loss" not in {trace.name for trace in figure.data}
    assert figure.layout.yaxis.title.text == "grad norm"
    assert 4.0 in {shape.y0 for shape in figure.layout.shapes}


def test_a_scale_is_drawn_on_a_logarithmic_axis_without_percentages() -> None:
    scale = {**TENSOR, "name": "a.input scale", "values": [1.0, 1e3, 1e6]}
    figure = draw({"series": [scale, LOSS]})
    assert figure is not None
    assert figure.layout.yaxis.type == "log" and "p" not in (figure.layout.yaxis.tickformat or "")
