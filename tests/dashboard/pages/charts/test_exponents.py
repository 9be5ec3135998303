"""The figure of the exponents of a tensor and the limits of its format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, trace_values

from fp8scope_dashboard.analysis.what_if.formats import format_named
from fp8scope_dashboard.pages.charts.exponents import Exponents, exponents_figure, summary_of
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import histograms
from fp8scope_dashboard.telemetry.histograms import EXPONENT_BINS, MIN_EXPONENT

LIGHT = THEMES["light"]


def exponents(scale: float = 1.0, **counts: float) -> Exponents:
    """An E4M3 histogram with counts by exponent; `em3` is the exponent -3."""
    values = np.zeros(EXPONENT_BINS - 2)
    for name, count in counts.items():
        values[int(name[1:].replace("m", "-")) - MIN_EXPONENT] = count
    return Exponents(
        first=MIN_EXPONENT, counts=values, zeros=0.0, nonfinite=0.0, scale=scale, format=format_named("E4M3")
    )


def bars(histogram: Exponents, **options: Any) -> dict[str, dict[float, float]]:
    """Share of each bar, by the name of its group and its position."""
    drawn = exponents_figure(histogram, LIGHT, **options).data
    return {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in drawn}


def test_it_works() -> None:
    # With scale 1: maximum 448 < 2^9, smallest normal 2^-6, smallest subnormal 2^-9, zero up to 2^-10.
    histogram = replace(exponents(e9=1, e8=2, e0=80, em7=5, em9=4, em11=3), zeros=4.0, nonfinite=1.0)
    assert histogram.total == 100
    shown = bars(histogram)
    assert shown == {
        "saturates": {9.5: 0.01},
        "normal": {0.5: 0.8, 8.5: 0.02},
        "subnormal": {-8.5: 0.04, -6.5: 0.05},
        "becomes zero": {-10.5: 0.03},
        "zero": {next(iter(shown["zero"])): 0.04},
        "NaN or Inf": {next(iter(shown["NaN or Inf"])): 0.01},
    }
    assert next(iter(shown["zero"])) < -11 and next(iter(shown["NaN or Inf"])) > 10
    assert summary_of(histogram, "x").startswith("Exponents of x, by bins: 1.000% saturates, 82.000% normal")


def test_nothing_saturates_if_amax_does_not() -> None:
    # The limit 448 is in the lower half of the bin from 256 to 512, of which no element is above 400.
    histogram = replace(exponents(1.0, e8=5, e0=95), amax=400.0)
    stretched = replace(histogram, scale=1.5, amax=290.0)
    assert set(bars(histogram)) == set(bars(stretched)) == {"normal"}
    assert set(bars(replace(stretched, amax=310.0))) == {"normal", "saturates"}
    assert set(bars(replace(stretched, amax=float("nan")))) == {"normal", "saturates"}


@pytest.mark.parametrize("power", [-40, -3, 0, 5, 60])
def test_the_limits_move_with_the_scale(power: int) -> None:
    """Scaling a tensor and its limits by the same power does not change what happens to its elements."""
    moved = {f"e{exponent}".replace("-", "m"): 10.0 for exponent in range(-12 - power, 11 - power)}
    histogram = exponents(2.0**power, **moved)
    assert histogram.limits is not None
    assert histogram.limits[0] == pytest.approx(np.log2(448) - power)
    assert histogram.limits[1:] == (-6 - power, -9 - power, -10 - power)
    outcomes = np.array(histogram.outcomes())[histogram.counts > 0].tolist()
    assert outcomes == ["becomes zero"] * 2 + ["subnormal"] * 4 + ["normal"] * 15 + ["saturates"] * 2


def test_draws_the_limits_of_the_format() -> None:
    figure = exponents_figure(exponents(2.0, e0=1, e7=1), LIGHT)
    assert sorted(line.x0 for line in figure.layout.shapes) == [-10, -7, pytest.approx(np.log2(224))]
    labels = {note.text for note in figure.layout.annotations}
    assert labels == {"largest", "smallest normal", "smallest subnormal"}


@pytest.mark.parametrize("scale", [np.nan, 0.0, np.inf])
def test_without_a_scale_there_are_no_limits(scale: float) -> None:
    histogram = exponents(scale, e0=5)
    figure = exponents_figure(histogram, LIGHT)
    assert not figure.layout.shapes and {bar.name for bar in figure.data} == {"normal"}
    assert "without a known scale" in summary_of(histogram, "x")
    plain = replace(exponents(1.0, e0=5), format=format_named(""))
    assert plain.limits is None


def test_block_scales_do_not_show_what_saturates() -> None:
    figure = exponents_figure(replace(exponents(1.0, e12=5), in_blocks=True), LIGHT)
    assert {bar.name for bar in figure.data} == {"normal"} and len(figure.layout.shapes) == 3
    assert "largest (median block)" in {note.text for note in figure.layout.annotations}


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", ["em149", "e127", "em60"])
def test_any_exponent_can_be_drawn(name: str, compact: bool) -> None:
    figure = exponents_figure(exponents(1.0, **{name: 1.0}), LIGHT, compact=compact)
    assert sum(len(bar.x) for bar in figure.data) == 1
    low, high = figure.layout.xaxis.range
    assert low < figure.data[0].x[0] < high


def test_only_zeros_can_be_drawn() -> None:
    histogram = replace(exponents(1.0), zeros=7.0)
    assert bars(histogram) == {"zero": {next(iter(bars(histogram)["zero"])): 1.0}}


def store(run: Run, step: int, exponent: int) -> None:
    """Store a histogram of the first tensor of the run, as ingest would."""
    import pyarrow as pa

    counts = np.zeros(EXPONENT_BINS)
    counts[exponent - MIN_EXPONENT + 1] = 100
    table = pa.table({"counts": pa.array([list(counts)], pa.list_(pa.float64(), EXPONENT_BINS))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    writer = Writer.objects.get(run=run)
    histograms.append(run.id, writer.uuid, 1000 + step, step, [0], sink.getvalue().to_pybytes())


def figure_of(visitor: Visitor, run: Run, **query: str) -> Any:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/figures/exponents.json"), query)
    assert answer.status_code == 200
    return json.loads(answer.content)


def test_the_page_shows_the_histogram_of_a_step(admin: Visitor) -> None:
    run = make_run(admin.project, "sampled", precision="fp8")
    recorder = Recorder(run=run, tensors=["a.input"])
    steps = np.arange(1, 21)
    recorder.rows(steps, {}, {"amax": np.ones((20, 1)), "scale": np.full((20, 1), 2.0)})
    assert "run.watch" in figure_of(admin, run, tensor="a.input")["empty"]
    store(run, 1, 3)
    store(run, 11, 5)
    for query, step, position in (({}, 11, 5.5), ({"step": "11"}, 11, 5.5), ({"step": "10"}, 1, 3.5)):
        answer = figure_of(admin, run, tensor="a.input", **query)
        assert f"at step {step}" in answer["summary"]
        assert trace_values(answer["figure"]["data"][0]["x"]).tolist() == [position]
        assert len(answer["figure"]["layout"]["shapes"]) == 3
    assert "empty" in figure_of(admin, run, tensor="a.input", step="0")
    assert "Select a tensor" in figure_of(admin, run, tensor="nobody")["empty"]
    for nonsense in ("-1", "x", "9" * 40, "1.5", "٣"):
        assert "at step 11" in figure_of(admin, run, tensor="0", step=nonsense)["summary"]
    page = admin.client.get(admin.address(f"runs/{run.id}/tensors/0/?step=10")).content.decode()
    assert 'id="tensor-history"' in page and '"step": 1,' in page
