"""The views that serve figures as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import TENSORS, Seeded
from dashboard.helpers.visitors import Visitor, get_json, trace_values

from fp8scope_dashboard.pages.charts.series import POINTS


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    answer = get_json(admin, f"runs/{seeded.healthy.id}/figures/loss.json")
    names = {trace.get("name") for trace in answer["figure"]["data"]}
    assert {"gpt fp8 delayed", "gpt bf16 seed 1", "BF16 (3 seeds)"} <= names
    assert answer["summary"].startswith("loss of gpt fp8 delayed: ")


def test_draws_the_loss_without_baseline(admin: Visitor, seeded: Seeded) -> None:
    answer = get_json(admin, f"runs/{seeded.healthy.id}/figures/loss.json", baseline="0", smooth="0")
    (line, *_) = answer["figure"]["data"]
    assert line["name"] == "gpt fp8 delayed" and len(trace_values(line["y"])) == 150


def test_marks_nan(admin: Visitor, seeded: Seeded) -> None:
    answer = get_json(admin, f"runs/{seeded.faulty.id}/figures/loss.json")
    crosses = [trace for trace in answer["figure"]["data"] if "not finite" in (trace.get("name") or "")]
    assert len(crosses) == 1 and "not finite" in answer["summary"]
    low, high = answer["figure"]["layout"]["yaxis"]["range"]
    assert 1 < low < 3 and high < 8


def test_downsampling_keeps_a_spike_of_one_step(admin: Visitor) -> None:
    run = make_run(admin.project, "long", precision="fp8")
    loss = np.full(20 * POINTS, 2.0)
    loss[777] = 2.9
    Recorder(run=run).rows(np.arange(len(loss)), {"loss": loss}, rows_per_batch=5_000)
    for query in ({}, {"compact": "1"}):
        line, *_ = get_json(admin, f"runs/{run.id}/figures/loss.json", **query)["figure"]["data"]
        assert len(trace_values(line["y"])) <= POINTS and 2.9 in trace_values(line["y"])


def test_draws_over_steps_tokens_or_time(admin: Visitor, seeded: Seeded, subtests: pytest.Subtests) -> None:
    for axis, last in (("step", 149.0), ("tokens", 150.0 * 2048), ("time", 14.9 / 60)):
        with subtests.test(axis=axis):
            query = {"x": axis, "smooth": "0", "baseline": "0"}
            answer = get_json(admin, f"runs/{seeded.healthy.id}/figures/loss.json", **query)
            line, *_ = answer["figure"]["data"]
            assert trace_values(line["x"])[-1] == pytest.approx(last)


def test_draws_a_range_of_steps(admin: Visitor, seeded: Seeded) -> None:
    query = {"first": "20.4", "last": "30", "smooth": "0", "baseline": "0"}
    line, *_ = get_json(admin, f"runs/{seeded.healthy.id}/figures/loss.json", **query)["figure"]["data"]
    assert trace_values(line["x"]).tolist() == list(range(20, 31))


def test_draws_each_step_of_a_range_of_tokens_or_time(admin: Visitor, subtests: pytest.Subtests) -> None:
    run, count = make_run(admin.project, "long", precision="fp8"), 10 * POINTS
    scalars = {"loss": 2.0 + np.arange(count) % 7, "tokens": 512.0 * np.arange(1, count + 1)}
    Recorder(run=run).rows(np.arange(count), scalars, rows_per_batch=6_000)
    whole = {"smooth": "0", "baseline": "0"}
    for axis in ("tokens", "time"):
        with subtests.test(axis=axis):
            answer = get_json(admin, f"runs/{run.id}/figures/loss.json", x=axis, **whole)
            coarse = trace_values(answer["figure"]["data"][0]["x"])
            low, high = coarse[-1] * 0.500, coarse[-1] * 0.505
            query = {"x": axis, "from": str(low), "to": str(high), **whole}
            line, *_ = get_json(admin, f"runs/{run.id}/figures/loss.json", **query)["figure"]["data"]
            x = trace_values(line["x"])
            inside = x[(x >= low) & (x <= high)]
            # Every step is there, at the place that it has in the whole chart.
            assert len(inside) == pytest.approx(0.005 * count, abs=1) and len(inside) > len(x) - 20
            assert x[0] <= low and x[-1] >= high and len(np.unique(np.diff(inside).round(9))) == 1
            assert np.isin(coarse[(coarse >= low) & (coarse <= high)].round(9), inside.round(9)).all()


def test_a_range_of_tokens_of_a_run_without_tokens_is_one_of_steps(admin: Visitor) -> None:
    run = make_run(admin.project, "plain", precision="fp8")
    Recorder(run=run).rows(np.arange(50), {"loss": np.linspace(3, 2, 50)})
    query = {"x": "tokens", "from": "20", "to": "30", "smooth": "0"}
    line, *_ = get_json(admin, f"runs/{run.id}/figures/loss.json", **query)["figure"]["data"]
    assert trace_values(line["x"]).tolist() == list(range(20, 31))


INVALID: list[dict[str, str]] = [
    {"x": "tokens", "from": "nan", "to": "1e400"},
    {"x": "time", "from": "9", "to": "2"},
    {"first": "nan", "last": "1e400"},
    {"first": "x" * 500},
    {"first": str(10**30)},
    {"theme": "<x>", "x": "y", "compact": "2", "smooth": "?", "log": "!"},
    {"statistic": "nothing", "name": "nothing", "tensor": "-1"},
    {"tensor": "²", "role": "x" * 900, "filter": "%_" * 300},
]


# Subtests, because storing the runs takes longer than all of these requests.
def test_ignores_invalid_parameters(admin: Visitor, seeded: Seeded, subtests: pytest.Subtests) -> None:
    for name in ("loss", "scalar", "heatmap", "tensor"):
        for query in INVALID:
            with subtests.test(name=name, query=query):
                get_json(admin, f"runs/{seeded.healthy.id}/figures/{name}.json", **query)


@pytest.mark.parametrize("name", ["loss", "scalar", "heatmap", "tensor"])
def test_a_new_run_says_what_is_missing(admin: Visitor, name: str) -> None:
    run = make_run(admin.project, "new")
    assert len(get_json(admin, f"runs/{run.id}/figures/{name}.json")["empty"]) > 20


def test_draws_scalars(admin: Visitor, seeded: Seeded) -> None:
    path = f"runs/{seeded.healthy.id}/figures/scalar.json"
    assert get_json(admin, path)["figure"]["layout"]["yaxis"]["title"]["text"] == "tokens / s"
    assert (
        get_json(admin, path, name="grad_norm")["figure"]["layout"]["yaxis"]["title"]["text"]
        == "Gradient norm"
    )
    assert "empty" in get_json(admin, path, name="unknown")


def test_draws_the_heat_map_of_tensors(admin: Visitor, seeded: Seeded) -> None:
    path = f"runs/{seeded.faulty.id}/figures/heatmap.json"
    layout = get_json(admin, path)["figure"]["layout"]
    assert layout["meta"]["names"] == TENSORS
    worst = get_json(admin, path, order="worst")["figure"]["layout"]["meta"]
    assert all("mlp.down.input" in name for name in worst["names"][:6])
    assert [TENSORS[i] for i in worst["indices"]] == worst["names"]


def test_leaves_out_tensors_without_the_statistic(admin: Visitor) -> None:
    """A master gradient has an amax, but is never cast: it cannot overflow."""
    run = make_run(admin.project, "with gradients", precision="fp8")
    recorder = Recorder(run=run, tensors=["up.input", "up.weight_grad"])
    input_only = [0.0, np.nan]
    recorder.rows(
        [1, 2],
        {},
        {
            "amax": [[1, 2]] * 2,
            "numel": [[9, 9]] * 2,
            "saturated": [input_only] * 2,
            "nonfinite": [input_only] * 2,
        },
    )
    path = f"runs/{run.id}/figures/heatmap.json"
    assert get_json(admin, path)["figure"]["layout"]["meta"] == {"indices": [0], "names": ["up.input"]}
    both = get_json(admin, path, statistic="amax", order="worst")["figure"]["layout"]["meta"]
    assert both["names"] == ["up.weight_grad", "up.input"]


def test_filters_tensors(admin: Visitor, seeded: Seeded) -> None:
    path = f"runs/{seeded.faulty.id}/figures/heatmap.json"
    names = get_json(admin, path, role="grad_output", filter="MLP.up")["figure"]["layout"]["meta"]["names"]
    assert names == [name for name in TENSORS if "mlp.up.grad_output" in name]
    assert "empty" in get_json(admin, path, filter="nothing like this")


def test_draws_one_tensor(admin: Visitor, seeded: Seeded, subtests: pytest.Subtests) -> None:
    for tensor in (TENSORS[6], "6"):
        with subtests.test(tensor=tensor):
            answer = get_json(admin, f"runs/{seeded.faulty.id}/figures/tensor.json", tensor=tensor)
            names = {trace["name"] for trace in answer["figure"]["data"]}
            assert {"amax", "largest representable", "overflow rate", "underflow rate"} <= names
            assert TENSORS[6] in answer["summary"]


def test_light_and_dark_differ(admin: Visitor, seeded: Seeded) -> None:
    path = f"runs/{seeded.healthy.id}/figures/loss.json"
    light, dark = (json.dumps(get_json(admin, path, theme=theme)) for theme in ("light", "dark"))
    assert "#0b63b5" in light and "#0b63b5" not in dark and "#6fb4f2" in dark


def test_answers_are_compressed(admin: Visitor, seeded: Seeded) -> None:
    path = admin.address(f"runs/{seeded.faulty.id}/figures/heatmap.json")
    answer = admin.client.get(path, headers={"Accept-Encoding": "gzip"})
    assert answer["Content-Encoding"] == "gzip"


def test_nothing_is_kept_in_caches_in_any_format(admin: Visitor, seeded: Seeded) -> None:
    path = admin.address(f"runs/{seeded.faulty.id}/figures/loss.json")
    for form in ("", "svg", "csv", "json"):
        answer = admin.client.get(path, {"format": form})
        assert "no-store" in answer["Cache-Control"] and "private" in answer["Cache-Control"], form
