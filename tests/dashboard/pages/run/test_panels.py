"""The panels of a run on one axis of steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, get_json, trace_values

from fp8scope_dashboard.alerts.models import Rule, RuleKind
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.pages.charts.curves import Curve
from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.pages.run.figures.panels import FigurePanel, PlainLine, log_ticks, panels_figure
from fp8scope_dashboard.pages.tensors.range_counts import (
    OVERFLOW,
    UNDERFLOW,
    counts_of,
    limits_of,
    on_columns,
    read_counts,
)
from fp8scope_dashboard.runs.models import Run

X = np.arange(5.0)


def titles(answer: dict[str, Any]) -> list[str]:
    notes = answer["figure"]["layout"]["annotations"]
    return [note["text"] for note in notes]


def trace(answer: dict[str, Any], name: str) -> dict[str, Any]:
    drawn: list[dict[str, Any]] = answer["figure"]["data"]
    return next(trace for trace in drawn if trace.get("name") == name and trace.get("fill") != "toself")


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    answer = get_json(admin, f"runs/{seeded.faulty.id}/figures/panels.json")
    assert titles(answer) == [
        "loss",
        "difference to the baseline",
        "tensors out of range, of 48",
        "gradient norm",
        "learning rate",
    ]
    layout = answer["figure"]["layout"]
    # One axis of steps for all panels, and one hover.
    assert {trace["xaxis"] for trace in answer["figure"]["data"]} == {"x"} and "xaxis2" not in layout
    assert layout["hoversubplots"] == "axis" and layout["xaxis"]["range"] == [0, 149]
    assert "are not finite" in answer["summary"] and "Difference to the baseline" in answer["summary"]


def test_panels_do_not_overlap_and_only_steps_are_brushed(admin: Visitor, seeded: Seeded) -> None:
    layout = get_json(admin, f"runs/{seeded.healthy.id}/figures/panels.json")["figure"]["layout"]
    axes = [layout[name] for name in ("yaxis", "yaxis2", "yaxis3", "yaxis4", "yaxis5")]
    assert all(axis["fixedrange"] for axis in axes)
    assert all(lower["domain"][1] < upper["domain"][0] for upper, lower in zip(axes, axes[1:], strict=False))
    assert axes[0]["domain"][1] == 1.0 and axes[-1]["domain"][0] == pytest.approx(0.0)


def test_the_band_spans_the_seeds(admin: Visitor, seeded: Seeded) -> None:
    data = get_json(admin, f"runs/{seeded.healthy.id}/figures/panels.json")["figure"]["data"]
    area, mean, *_ = [trace for trace in data if trace.get("name") == "bf16 (3 seeds)"]
    assert area["fill"] == "toself"
    assert len(trace_values(area["x"])) == 2 * len(trace_values(mean["x"]))
    half = len(trace_values(mean["x"]))
    high, low = trace_values(area["y"])[:half], trace_values(area["y"])[half:][::-1]
    values = trace_values(mean["y"])
    assert (low <= values + 1e-12).all() and (values <= high + 1e-12).all() and (low < high).any()


def test_the_names_tell_the_panels_apart(admin: Visitor, seeded: Seeded) -> None:
    """One hover and one table hold the lines of all panels."""
    path = admin.address(f"runs/{seeded.healthy.id}/figures/panels.json")
    header, *rows = admin.client.get(path, {"format": "csv", "smooth": "0"}).content.decode().splitlines()
    for name in ("bf16 (3 seeds)", "gpt fp8 delayed", '"gradient norm, gpt fp8 delayed"', "learning rate"):
        assert name in header, header
    assert "(2)" not in header and len(rows) == 150


def test_the_number_holds_until_tensors_are_observed_again(admin: Visitor) -> None:
    run = make_run(admin.project, "plain", precision="bf16")
    recorder = Recorder(run=run, tensors=["a.input", "b.input"])
    nan = np.nan
    rates = np.array([[5.0, 0.0], [nan, nan], [nan, nan], [0.0, 0.0], [nan, nan]])
    counts: dict[str, Any] = {
        "numel": np.where(np.isnan(rates), nan, 10.0),
        "saturated": rates,
        "nonfinite": 0.0 * rates,
    }
    recorder.rows(np.arange(5), {"loss": np.ones(5)}, counts)
    line = trace(get_json(admin, f"runs/{run.id}/figures/panels.json"), "overflow ≥ 0.10\u202f%")
    assert trace_values(line["x"]).tolist() == [0, 3, 4] and trace_values(line["y"]).tolist() == [1, 0, 0]
    assert line["line"]["shape"] == "hv"


def test_the_difference_is_that_of_the_comparison(admin: Visitor, seeded: Seeded) -> None:
    answer = get_json(admin, f"runs/{seeded.healthy.id}/figures/panels.json")
    curve = seeded.healthy.comparison.result["curve"]
    line = trace(answer, "difference, with its interval")
    assert trace_values(line["y"])[-1] == pytest.approx(curve["delta"][-1])
    # The comparison counts tokens; the panels show steps: 2,048 tokens each, counted from 1.
    assert curve["x_name"] == "tokens"
    assert trace_values(line["x"])[-1] == pytest.approx(curve["x"][-1] / 2_048 - 1, abs=1)


def test_draws_a_range_of_steps(admin: Visitor, seeded: Seeded) -> None:
    path = f"runs/{seeded.faulty.id}/figures/panels.json"
    answer = get_json(admin, path, first="40", last="60", smooth="0")
    (raw, *_) = [trace for trace in answer["figure"]["data"] if trace.get("name") == "gpt fp8 frozen scale"]
    assert trace_values(raw["x"]).tolist() == list(range(40, 61))
    assert answer["figure"]["layout"]["xaxis"]["range"] == [40, 60]
    for invalid in ({"first": "90", "last": "10"}, {"first": "-5", "last": "1e400"}, {"first": "x"}):
        get_json(admin, path, **invalid)


def test_adds_another_panel_and_a_log_axis(admin: Visitor, seeded: Seeded) -> None:
    path = f"runs/{seeded.healthy.id}/figures/panels.json"
    answer = get_json(admin, path, also="tokens_per_second", log="1")
    assert titles(answer)[-1] == "tokens per second"
    assert answer["figure"]["layout"]["yaxis"]["type"] == "log"
    for known in ("loss", "nonsense"):
        assert titles(get_json(admin, path, also=known)) == titles(get_json(admin, path))


def test_a_run_with_little_data(admin: Visitor) -> None:
    run = make_run(admin.project, "new", precision="fp8", baseline="bf16")
    path = f"runs/{run.id}/figures/panels.json"
    assert "No loss yet" in get_json(admin, path)["empty"]
    Recorder(run=run).rows([3], {"loss": [np.nan]})
    answer = get_json(admin, path)
    assert titles(answer) == ["loss"] and "1 of the points shown are not finite" in answer["summary"]


def test_marks_values_outside_of_a_panel() -> None:
    y = np.array([1.0, np.nan, np.inf, 9.0, -9.0])
    panel = FigurePanel(
        title="loss",
        height=100,
        y_range=(0.0, 2.0),
        curves=(Curve(name="a<b", arm="", slot="fp8-1", x=X, y=y),),
    )
    figure = panels_figure([panel], THEMES["light"], marks=[Mark(x=2.0, text="Spike", severe=True)])
    # Plotly checks what a plain figure does not, and writes the same.
    checked = figure.editable()
    assert go.Figure(checked.to_dict()).to_plotly_json().keys() == checked.to_plotly_json().keys()
    assert json.loads(checked.to_json(validate=False)) == json.loads(figure.to_json())
    places = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data[1:]}
    assert places["a&lt;b: not finite"] == ([1.0, 2.0], [2.0, 2.0])
    assert places["a&lt;b: above the panel"] == ([3.0], [2.0])
    assert places["a&lt;b: below the panel"] == ([4.0], [0.0])
    # Above the edge, where the pointer is over the panel.
    assert places["alert"] == ([2.0], [pytest.approx(0.07)])
    (line,) = [shape for shape in figure.layout.shapes if shape.xref == "x"]
    assert (line.x0, line.yref, line.y0, line.y1) == (2.0, "paper", 0, 1)


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    panel = FigurePanel(
        title="x", height=60, lines=(PlainLine(name="l", x=X, y=np.array([0.0, np.inf, np.nan, 1.0, 2.0])),)
    )
    (line,) = panels_figure([panel, panel], THEMES["dark"]).data[:1]
    assert np.isnan(line.y[1:3]).all()
    with pytest.raises(ValueError, match="at least one"):
        panels_figure([], THEMES["light"])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 40.0, [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]),
        (0.009, 20.0, [0.01, 0.1, 1.0, 10.0]),
        (1e-9, 1e3, [1e-9, 1e-6, 1e-3, 1.0, 1e3]),
        (3.0, 4.0, []),
    ],
)
def test_ticks_of_a_log_axis(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks((low, high)) == pytest.approx(ticks)


def test_numbers_of_tensors() -> None:
    nan = np.nan
    overflow = np.array([[0.0, 0.1, nan], [0.2, nan, nan], [0.0, 0.0, nan], [nan, 0.1, nan]])
    underflow = np.array([[0.9, 0.0, nan], [0.9, nan, nan], [0.0, 0.6, nan], [nan, 0.0, nan]])
    counts = counts_of(np.array([0, 5, 9, 12]), overflow, underflow, {OVERFLOW: 0.1, UNDERFLOW: 0.5})
    np.testing.assert_array_equal(counts.overflow, [1.0, 2.0, nan])
    np.testing.assert_array_equal(counts.underflow, [2.0, 1.0, nan])
    # The second tensor of the first column has both.
    np.testing.assert_array_equal(counts.either, [2.0, 3.0, nan])
    assert counts.observed == 3


def test_two_of_many_tensors_are_seen(admin: Visitor) -> None:
    """The panel counts: as a share of hundreds of tensors, two would be a flat line."""
    run = make_run(admin.project, "experts", precision="fp8")
    recorder = Recorder(run=run, tensors=[f"experts.{number}.up.input" for number in range(600)])
    saturated = np.zeros((10, 600))
    saturated[5:, 100:102] = 20.0
    full = np.full_like(saturated, 1_000.0)
    statistics = {"saturated": saturated, "nonfinite": 0 * full, "underflow": 0 * full, "numel": full}
    recorder.rows(np.arange(10), {"loss": np.ones(10)}, statistics)
    answer = get_json(admin, f"runs/{run.id}/figures/panels.json")
    assert "tensors out of range, of 600" in titles(answer)
    assert "At most 2 of 600 tensors overflow or underflow at the same time." in answer["summary"]
    (line,) = [trace for trace in answer["figure"]["data"] if str(trace.get("name")).startswith("overflow")]
    assert trace_values(line["y"]).tolist() == [0.0] * 5 + [2.0] * 5
    # Half of the panel's height, at least.
    (axis,) = [
        axis for key, axis in answer["figure"]["layout"].items()
        if key.startswith("yaxis") and key.removeprefix("yaxis") == line["yaxis"].removeprefix("y")
    ]  # fmt: skip
    assert axis["range"] == [0.0, 4.0]


def test_the_limits_are_those_of_the_rules(admin: Visitor) -> None:
    run = make_run(admin.project, "r", precision="fp8")
    other = make_run(admin.project, "s", precision="fp8")
    assert limits_of(run) == {OVERFLOW: 0.001, UNDERFLOW: 0.5}
    Rule.objects.filter(kind="saturation_rate").update(parameters={"rate": 0.02})
    Rule.objects.create(project=admin.project, run=run, kind="underflow_rate", parameters={"rate": 0.7})
    assert limits_of(run) == {OVERFLOW: 0.02, UNDERFLOW: 0.7}
    assert limits_of(other) == {OVERFLOW: 0.02, UNDERFLOW: 0.5}


def test_a_map_read_later_is_moved_to_the_columns_of_the_first() -> None:
    later = np.array([[1.0, 2.0, 3.0]])
    moved = on_columns(later, np.array([4, 6, 8, 10]), np.array([1, 3, 5, 7, 9, 11, 13]))
    np.testing.assert_array_equal(moved, [[np.nan, np.nan, 1.0, 2.0, 3.0, np.nan]])


def test_a_loss_that_is_never_finite_is_marked(admin: Visitor) -> None:
    run = make_run(admin.project, precision="fp8")
    Recorder(run=run).rows(np.arange(5), {"loss": np.full(5, np.nan)})
    answer = get_json(admin, f"runs/{run.id}/figures/panels.json")
    (crosses,) = [each for each in answer["figure"]["data"] if "not finite" in (each.get("name") or "")]
    assert trace_values(crosses["x"]).tolist() == [0.0, 4.0]
    # The marks need a place, and its numbers would mean nothing.
    axis = answer["figure"]["layout"]["yaxis"]
    assert axis["range"] == [0.0, 1.0] and axis["showticklabels"] is False


def test_a_run_of_one_step_is_shown_beside_its_whole_baseline(admin: Visitor) -> None:
    baseline = make_run(admin.project, "bf16", precision="bf16", group="bf16")
    Recorder(run=baseline).rows(np.arange(50), {"loss": np.linspace(3.0, 2.0, 50)})
    run = make_run(admin.project, precision="fp8", baseline="bf16")
    writer = Recorder(run=run, tensors=["a.input"])
    statistics = {name: [[4.0]] for name in ("numel", "saturated", "underflow", "nonfinite")}
    writer.rows([3], {"loss": [2.9]}, statistics)
    figure = get_json(admin, f"runs/{run.id}/figures/panels.json")["figure"]
    assert figure["layout"]["xaxis"]["range"] == [0.0, 49.0]
    lines = [trace for trace in figure["data"] if (trace.get("name") or "").startswith("overflow")]
    assert [line["mode"] for line in lines] == ["markers"]


def test_small_losses_have_powers_of_ten() -> None:
    panel = FigurePanel(
        title="loss",
        height=200,
        y_range=(1e-6, 5e-6),
        curves=(Curve(name="a", arm="", slot="fp8-1", x=X, y=X * 1e-6),),
    )
    assert panels_figure([panel], THEMES["light"]).layout.yaxis.exponentformat == "power"


def test_numbers_of_tensors_are_read_again_when_rows_or_limits_have_changed(admin: Visitor) -> None:
    run = make_run(admin.project, "r", precision="fp8")
    recorder = Recorder(run=run, tensors=["a", "b"])

    def rows(first: int, saturated: list[float]) -> None:
        steps = np.arange(first, first + 10)
        values = {"saturated": saturated, "nonfinite": [0.0, 0.0], "numel": [1000.0, 1000.0]}
        recorder.rows(
            steps, {"loss": steps + 1.0}, {key: np.tile(each, (10, 1)) for key, each in values.items()}
        )

    def overflowing() -> list[float]:
        read = read_counts(Run.objects.get(pk=run.pk), first=None, last=None, columns=20)
        assert read is not None
        return [float(each) for each in read.overflow]

    rows(0, [100.0, 0.0])
    assert overflowing() == overflowing() == [1.0] * 10
    rows(10, [100.0, 100.0])
    assert overflowing() == [1.0] * 10 + [2.0] * 10
    Rule.objects.create(project=admin.project, kind=RuleKind.SATURATION_RATE, parameters={"rate": 0.5})
    assert overflowing() == [0.0] * 20


def test_the_smoothed_difference_ends_before_its_average_becomes_noise(admin: Visitor) -> None:
    x = np.arange(200)
    baseline = make_run(admin.project, "bf16", precision="bf16", group="bf16")
    Recorder(run=baseline).rows(x, {"loss": np.full(200, 2.0)}, rows_per_batch=100)
    run = make_run(admin.project, precision="fp8", baseline="bf16")
    Recorder(run=run).rows(x[:160], {"loss": 2.0 + 0.5 * (-1.0) ** x[:160]}, rows_per_batch=80)
    compare(run.id)
    answer = get_json(admin, f"runs/{run.id}/figures/panels.json")
    fine = trace_values(trace(answer, "difference, smoothed")["y"])
    # The last step alone is 25 % above the baseline.
    assert abs(fine[-1]) < 0.1 and abs(fine[40:]).max() < 0.1
