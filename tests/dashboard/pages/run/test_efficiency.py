"""The efficiency figure: the mean time of each phase of a step, and the numbers beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json, trace_values
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.theme import theme_named
from fp8scope_dashboard.pages.run import efficiency
from fp8scope_dashboard.pages.run.efficiency import (
    PHASES,
    Split,
    bucket_means,
    gibibytes,
    read_split,
    recent_figures,
    tera,
)
from fp8scope_dashboard.pages.run.figures.step_phases import HEADROOM, efficiency_figure, top_of
from fp8scope_dashboard.runs.models import Run

STEPS = 300


def measures(steps: int = STEPS) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Scalars of a run that spends a fifth of its time waiting for data."""
    ones = np.ones(steps)
    return {
        "loss": ones,
        "time_forward": 0.020 * ones,
        "time_backward": 0.040 * ones,
        "time_optimizer": 0.010 * ones,
        "time_other": 0.010 * ones,
        "time_data": 0.020 * ones,
        "tokens_per_second": 5e5 * ones,
        "mfu": 0.41 * ones,
        "model_flops_per_second": 4.05e14 * ones,
        "memory_reserved": 60e9 * ones,
        "memory_peak": 55e9 * ones,
        "memory_rss": 2e9 * ones,
        "gpu_utilization": 0.97 * ones,
    }


@pytest.fixture
def measured(admin: Visitor) -> Run:
    run = make_run(admin.project, "measured")
    Recorder(run=run).rows(np.arange(STEPS), measures())
    run.refresh_from_db()
    return run


def test_it_works(admin: Visitor, measured: Run) -> None:
    answer = get_json(admin, f"runs/{measured.id}/figures/efficiency.json")
    traces = answer["figure"]["data"]
    assert [trace["name"] for trace in traces] == [glossary.title(name) for name in PHASES]
    assert {trace["stackgroup"] for trace in traces} == {"step"}
    means = [trace_values(trace["y"]).mean() for trace in traces]
    assert means == pytest.approx([20, 40, 10, 10, 20])
    assert answer["figure"]["layout"]["yaxis"]["title"]["text"] == "ms / step"
    assert "Backward 40.0" in answer["summary"] and "Waiting for data 20.0" in answer["summary"]


def test_the_page_shows_speed_and_memory(admin: Visitor, measured: Run) -> None:
    page = admin.client.get(admin.address(f"runs/{measured.id}/?tab=efficiency")).content.decode()
    for text in ("Efficiency", "500k", "41.0", "405 TFLOP/s", "55.9 GiB", "97.0"):
        assert text in page, text


def test_a_run_without_measurements_says_how_to_get_them(admin: Visitor) -> None:
    run = make_run(admin.project, "bare")
    for steps in (0, 10):
        if steps:
            Recorder(run=run).rows(np.arange(steps), {"loss": np.ones(steps)})
            run.refresh_from_db()
        assert "run.watch" in get_json(admin, f"runs/{run.id}/figures/efficiency.json")["empty"]
        assert recent_figures(run) == []
        assert admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency")).status_code == 200


def test_draws_a_range_of_steps(admin: Visitor, measured: Run) -> None:
    answer = get_json(admin, f"runs/{measured.id}/figures/efficiency.json", first="100", last="149")
    x = trace_values(answer["figure"]["data"][0]["x"])
    assert x.min() == 100 and x.max() == 149


def test_reads_only_the_last_steps_of_a_long_run(measured: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "MAX_STEPS", 50)
    split = read_split(measured.id, first=None, last=None, points=1000)
    assert (split.x[0], split.x[-1]) == (STEPS - 50, STEPS - 1)
    assert read_split(measured.id, first=None, last=99, points=1000).x.tolist() == list(range(50, 100))


def test_shows_process_memory_if_there_is_no_device(admin: Visitor) -> None:
    run = make_run(admin.project, "on a CPU")
    Recorder(run=run).rows(np.arange(3), {"loss": np.ones(3), "memory_rss": np.full(3, 512.0 * 2**20)})
    run.refresh_from_db()
    assert [(figure.term, figure.value) for figure in recent_figures(run)] == [("memory_rss", "512 MiB")]


def test_leaves_out_values_that_are_not_finite(admin: Visitor) -> None:
    run = make_run(admin.project, "odd")
    Recorder(run=run).rows(np.arange(3), {"mfu": np.full(3, np.nan), "memory_rss": np.full(3, np.inf)})
    run.refresh_from_db()
    assert recent_figures(run) == []


@pytest.mark.parametrize(
    ("training", "shown"),
    [
        ({"device": "cuda", "fp8_units": {"products": 36, "on_units": 24}}, "24 of 36"),
        ({"device": "cpu", "fp8_units": {"products": 36, "on_units": 0}}, None),
        ({"device": "cuda"}, None),
        ({"device": "cuda", "fp8_units": {"products": 2, "on_units": 3}}, None),
        ({"device": "cuda", "fp8_units": ["36"]}, None),
        ("none", None),
    ],
)
def test_shows_how_many_products_ran_on_fp8_units(training: object, shown: str | None) -> None:
    figures = recent_figures(Run(environment={"training": training}))
    assert [(figure.term, figure.value) for figure in figures] == ([("fp8_units", shown)] if shown else [])


def test_leaves_out_steps_with_an_unknown_phase() -> None:
    seconds = np.ones((len(PHASES), 4))
    seconds[2, 1] = np.nan
    seconds[0, 2] = -1
    split = bucket_means(np.arange(4), seconds, 100)
    assert split.x.tolist() == [0, 3] and split.shares == dict.fromkeys(PHASES, 0.2)
    assert bucket_means(np.arange(1), np.full((len(PHASES), 1), np.inf), 5).shares == {}


@given(st.integers(1, 500), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_buckets_keep_the_total(steps: int, buckets: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    numbers = np.cumsum(generator.integers(1, 5, steps))
    seconds = generator.exponential(1.0, (len(PHASES), steps))
    split = bucket_means(numbers, seconds, buckets)
    assert len(split.x) == min(steps, buckets) and (np.diff(split.x) > 0).all()
    sizes = np.diff(np.unique(np.linspace(0, steps, min(buckets, steps) + 1).astype(int)))
    assert (split.seconds * sizes).sum(axis=1) == pytest.approx(seconds.sum(axis=1))
    assert sum(split.shares.values()) == pytest.approx(1)


def test_a_checkpoint_does_not_flatten_the_other_steps() -> None:
    seconds = np.full((len(PHASES), 100), 0.02)
    seconds[3, 50] = 300.0
    split = Split(np.arange(100.0), seconds)
    assert top_of(split) == pytest.approx(HEADROOM * 0.1 * 1.06)
    figure = json.loads(efficiency_figure(split, theme_named("dark"), compact=True).to_json())
    assert figure["layout"]["yaxis"]["range"][1] == pytest.approx(1e3 * top_of(split))


def test_slow_steps_are_drawn_in_seconds() -> None:
    split = Split(np.arange(3.0), np.full((len(PHASES), 3), 2.0))
    figure = json.loads(efficiency_figure(split, theme_named("light"), compact=False).to_json())
    assert figure["layout"]["yaxis"]["title"]["text"] == "s / step"
    assert trace_values(figure["data"][0]["y"]).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("value", "text"), [(3 * 2**30, "3 GiB"), (1.5 * 2**20, "1.5 MiB"), (2**40, "1024 GiB")]
)
def test_formats_bytes(value: float, text: str) -> None:
    assert gibibytes(value).replace("\N{NARROW NO-BREAK SPACE}", "") == text


@pytest.mark.parametrize(
    ("value", "text"), [(9.89e14, "989 T"), (1.2e16, "12 P"), (3.5e6, "3.5 M"), (12, "12 ")]
)
def test_formats_operations(value: float, text: str) -> None:
    assert tera(value) == text


def test_every_phase_has_a_help_text() -> None:
    assert all(glossary.GLOSSARY[name].definition for name in PHASES)
