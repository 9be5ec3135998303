"""The arithmetic of docs/scale.md, against formulas of queues."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from helpers.code_blocks import ROOT


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "scale_model", raising=False)
    import scale_model

    return scale_model


def constants(model: Any, **changes: float) -> Any:
    fixed = {"web": 1.0, "postgres": 2.0, "redis": 0.5, "jobs": 1.5, **changes}
    return model.Constants(fixed, dict.fromkeys(model.PARTS, 1.0), bytes_per_point=2.0)


def test_it_works(model: Any) -> None:
    """The rates of a fleet, and what they ask of each part."""
    fleet = model.Fleet("some", runs=10, ranks=4, tensors=100, step_seconds=0.5, interval=2.0)
    assert fleet.messages == 20.0
    assert fleet.points == 40 * (40 + 700) / 0.5
    asked = model.demand(fleet, constants(model), cores=8)
    points_of_a_message = 4 * 740
    assert asked.busy["web"] == pytest.approx(20 * (1.0 + points_of_a_message / 1000) / 1000)
    assert asked.gib_a_day == pytest.approx(59200 * 2 * 86400 / 2**30)
    assert (asked.web_processes, asked.first) == (1, "nothing")
    assert asked.line()["connections"] == 16 + 1 + 4


def test_a_rank_sends_no_more_often_than_it_steps(model: Any) -> None:
    assert model.Fleet("slow", 1, 100, 10, step_seconds=10.0).messages == 10.0


def test_the_fit_finds_what_made_the_times(model: Any) -> None:
    made = constants(model)
    sizes = (130, 1210, 4840, 16040)
    loads = [
        {"points": size, **{f"{part}_ms": made.service_ms(part, size) for part in model.PARTS}}
        for size in sizes
    ]
    fit = model.fitted(loads, 2.0)
    assert fit.fixed_ms == pytest.approx(made.fixed_ms) and fit.point_us == pytest.approx(made.point_us)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (100, "nothing"),
        (1_000, "web processes on the same machine"),
        (1_800, "machines for web and workers"),
        (10_000, "nodes of the store"),
    ],
)
def test_more_ranks_need_more(model: Any, ranks: int, words: str) -> None:
    fleet = model.Fleet("a run", runs=1, ranks=ranks, tensors=0)
    assert words in model.demand(fleet, constants(model), cores=8).first


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_queue_waits_as_long_as_the_formula_says(model: Any, load: float) -> None:
    """One server and random arrivals: the mean wait of Pollaczek and Khinchine."""
    service, variation = 10.0, 0.5
    times = model.simulate([service], [1], 1000 * load / service, 4000.0, seed=1)
    expected = service + load * service * (1 + variation**2) / (2 * (1 - load))
    assert sum(times) / len(times) == pytest.approx(expected, rel=0.05)


def test_with_servers_to_spare_nothing_waits(model: Any) -> None:
    times = model.simulate([4.0, 0.0], [50, 1], 100.0, 100.0)
    assert sum(times) / len(times) == pytest.approx(4.0, rel=0.03)
    assert model.percentile(sorted(times), 0.5) < model.percentile(times, 0.99)
