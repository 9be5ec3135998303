"""The heat map of many tensors, and the figure of one tensor."""

from __future__ import annotations

import numpy as np
import pytest

from fp8scope_dashboard.pages.charts.theme import THEMES, shortened
from fp8scope_dashboard.pages.tensors.heat_map import (
    NAMED_ROWS,
    TensorLines,
    heatmap_figure,
    short_labels,
    tensor_figure,
)

LIGHT = THEMES["light"]
NAMES = ["blocks.0.mlp.up.input", "blocks.0.mlp.up.grad_output", "blocks.0.mlp.down.input"]
EDGES = np.array([0, 10, 20, 30])
RATES = np.array([[0.0, 1e-4, 1.0], [np.nan, 0.0, 1e-9], [0.01, 0.01, 0.01]])


def test_it_works() -> None:
    (drawn,) = heatmap_figure(NAMES, EDGES, RATES, "overflow_rate", LIGHT).data
    assert drawn.x.tolist() == [4.5, 14.5, 24.5]
    assert drawn.z[0, 1] == pytest.approx(-4.0) and drawn.z[2, 0] == pytest.approx(-2.0)
    np.testing.assert_array_equal(drawn.customdata, RATES.astype(np.float32))


def test_zero_missing_and_tiny_values_differ() -> None:
    (drawn,) = heatmap_figure(NAMES, EDGES, RATES, "overflow_rate", LIGHT).data
    zero, tiny = drawn.z[0, 0], drawn.z[1, 2]
    assert zero == drawn.zmin < tiny < drawn.z[0, 1]
    assert np.isnan(drawn.z[1, 0])


def test_rates_have_the_same_colour_scale_in_every_run() -> None:
    calm = heatmap_figure(NAMES, EDGES, RATES * 1e-3, "overflow_rate", LIGHT).data[0]
    wild = heatmap_figure(NAMES, EDGES, RATES, "overflow_rate", LIGHT).data[0]
    assert (calm.zmin, calm.zmax) == (wild.zmin, wild.zmax)


def test_other_statistics_are_scaled_to_their_values() -> None:
    amax = np.geomspace(1e-3, 1e3, 9).reshape(3, 3)
    (drawn,) = heatmap_figure(NAMES, EDGES, amax, "amax", LIGHT).data
    assert -3.1 < drawn.zmin < -2.5 and 2.5 < drawn.zmax < 3.1
    assert len(drawn.colorbar.tickvals) == len(drawn.colorbar.ticktext)


@pytest.mark.parametrize("value", [0.0, np.nan, 3.0])
def test_draws_constant_values(value: float) -> None:
    (drawn,) = heatmap_figure(NAMES, EDGES, np.full((3, 3), value), "amax", LIGHT).data
    assert drawn.zmin < drawn.zmax


def test_many_rows_have_no_labels() -> None:
    names = [f"blocks.{i}.input" for i in range(NAMED_ROWS + 1)]
    figure = heatmap_figure(names, EDGES, np.zeros((len(names), 3)), "amax", LIGHT)
    assert not figure.layout.yaxis.showticklabels
    assert figure.layout.height < 1200


def test_long_names_keep_both_ends() -> None:
    short = shortened("transformer.blocks.17.attention.query_key_value.grad_output", 30)
    assert len(short) == 30 and short.startswith("transf") and short.endswith("grad_output") and "…" in short
    assert shortened("short", 30) == "short"


def test_compact_labels_leave_out_the_common_prefix() -> None:
    figure = heatmap_figure(NAMES, EDGES, RATES, "amax", LIGHT, compact=True)
    assert figure.layout.yaxis.ticktext == ("up.in", "up.grad", "down.in")


def test_short_labels_tell_names_apart() -> None:
    experts = [
        f"model.layers.{layer}.mixture.experts.{expert}.{part}_projection.{role}"
        for layer in range(3)
        for expert in range(12)
        for part in ("gate", "up", "down")
        for role in ("input", "weight", "grad_output")
    ]
    labels = short_labels(experts, 20)
    assert len(set(labels)) == len(experts)
    assert max(map(len, labels)) < 40
    assert labels[0].startswith("0.0.") and labels[0].endswith("input")


def test_short_labels_keep_parts_at_different_depths() -> None:
    # Without the second part, `a.x.head.w` and `a.x.w` would be `a.head.w` and `a.w`.
    names = ["a.x.head_of_the_network.w", "a.x.w", "a.x.y.z.w"]
    assert short_labels(names, 22) == ["head_of_the_network.w", "w", "y.z.w"]


def test_short_labels_of_short_names_are_the_names() -> None:
    assert short_labels(["a.x.w", "a.y.w"], 20) == ["a.x.w", "a.y.w"]
    assert short_labels([], 20) == []


def test_one_step_is_drawn_as_points_on_an_axis_of_whole_steps() -> None:
    one = np.array([7])
    lines = {"amax": (one, np.array([1.0])), "overflow_rate": (one, np.array([0.1]))}
    figure = tensor_figure(TensorLines("a", "E4M3", lines), LIGHT)
    assert {trace.mode for trace in figure.data} == {"markers"}
    assert figure.layout.xaxis.range == (6, 8) and figure.layout.xaxis.dtick == 1


def test_draws_the_largest_representable_value_of_a_tensor() -> None:
    steps = np.arange(4)
    lines = {
        "amax": (steps, np.array([1.0, 2.0, 4.0, 8.0])),
        "scale": (steps, np.array([448.0, 224.0, 224.0, 0.0])),
        "overflow_rate": (steps, np.array([0.0, 0.0, 0.1, 0.5])),
        "underflow_rate": (steps, np.zeros(4)),
    }
    figure = tensor_figure(TensorLines("a.input", "e4m3", lines), LIGHT)
    traces = {trace.name: trace for trace in figure.data}
    np.testing.assert_array_equal(traces["largest representable"].y, [1.0, 2.0, 2.0, np.nan])
    assert traces["amax"].y.tolist() == [1.0, 2.0, 4.0, 8.0]
    assert set(traces) == {"largest representable", "amax", "overflow rate", "underflow rate"}


def test_the_first_scale_of_a_tensor_does_not_flatten_its_amax() -> None:
    steps = np.arange(30)
    scale = np.full(30, 64.0)
    scale[0] = 1.0
    lines = {"amax": (steps, np.linspace(3.0, 6.0, 30)), "scale": (steps, scale)}
    axis = tensor_figure(TensorLines("a.input", "e4m3", lines), LIGHT).layout.yaxis
    low, high = (10.0**end for end in axis.range)
    # 448 at the first step is left out, 7 and all of amax are not.
    assert 2.0 < low < 3.0 and 7.0 < high < 10.0
    assert axis.tickvals == (3.0, 4.0, 5.0, 6.0, 7.0)


def test_an_outlier_of_amax_is_within_the_range() -> None:
    steps = np.arange(1_000)
    amax = np.ones(1_000)
    amax[500] = 1e4
    figure = tensor_figure(TensorLines("a.input", "e4m3", {"amax": (steps, amax)}), LIGHT)
    assert figure.layout.yaxis.range[1] > 4.0 and figure.layout.yaxis.dtick == 1


@pytest.mark.parametrize("amax", [[0.0, np.nan], [np.inf, 0.0]])
def test_amax_without_a_logarithm_has_a_range_all_the_same(amax: list[float]) -> None:
    lines = {"amax": (np.arange(2), np.array(amax))}
    low, high = tensor_figure(TensorLines("a.input", "e4m3", lines), LIGHT).layout.yaxis.range
    assert np.isfinite([low, high]).all() and low < high


def test_an_unknown_format_has_no_limit() -> None:
    steps = np.arange(2)
    lines = {"amax": (steps, np.array([0.0, 1.0])), "scale": (steps, np.ones(2))}
    figure = tensor_figure(TensorLines("a.input", "int8", lines), LIGHT, compact=True)
    assert [trace.name for trace in figure.data] == ["amax"]
    assert np.isnan(figure.data[0].y[0])
