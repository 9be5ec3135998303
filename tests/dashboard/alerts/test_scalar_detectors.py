"""Gradient norm, speed, the wait for data and memory against their own past."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detection.streams import SCALAR_DETECTORS
from fp8scope_dashboard.alerts.detectors import ConditionChange, ScalarRows, State
from fp8scope_dashboard.alerts.services import evaluate

PARTS = {"time_forward": 0.03, "time_backward": 0.05, "time_optimizer": 0.01, "time_other": 0.01}


def found(
    kind: str, scalars: Mapping[str, np.ndarray], cuts: Sequence[int] = (), **parameters: Any
) -> list[ConditionChange]:
    rows = len(next(iter(scalars.values())))
    state: State = {}
    findings: list[ConditionChange] = []
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    for first, last in zip(edges, edges[1:], strict=False):
        state = json.loads(json.dumps(state, allow_nan=False))
        part = {name: values[first:last] for name, values in scalars.items()}
        logged = {name: np.ones(last - first, bool) for name in scalars}
        chunk = ScalarRows(np.arange(first, last), part, logged)
        state, new = SCALAR_DETECTORS[kind](state, chunk, rules.validate(kind, parameters))
        findings += new
    return findings


def norms(rows: int = 2_000, seed: int = 0, spread: float = 0.3) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0.0, spread, rows))


def test_it_works() -> None:
    norm = norms()
    norm[1_000:1_060] *= 30.0
    opened, closed = found("grad_norm", {"grad_norm": norm})
    assert (opened.onset_step, opened.step) == (1_000, 1_004)
    assert opened.message.startswith("Gradient norm rose to") and "since step 1,000" in opened.message
    assert not closed.opened and 1_050 < closed.step <= 1_079


def test_gradient_norms_of_a_healthy_training_are_no_alarm() -> None:
    decay = np.concatenate([np.linspace(30.0, 1.0, 300), np.ones(4_700)])
    spiky = norms(5_000) * decay
    spiky[::97] *= 20.0
    assert found("grad_norm", {"grad_norm": spiky}) == []


def test_a_gradient_norm_that_stays_infinite_is_found() -> None:
    norm = norms()
    norm[500] = np.inf
    norm[1_000:] = np.inf
    (opened,) = found("grad_norm", {"grad_norm": norm})
    assert (opened.onset_step, opened.value) == (1_000, None)
    assert opened.message.startswith("Gradient norm is not finite since step 1,000")


def test_steps_that_take_twice_as_long_are_found() -> None:
    seconds = 0.1 * norms(spread=0.05)
    seconds[1_000:] *= 2.0
    opened = found("throughput_drop", {"step_seconds": seconds})[0]
    assert 1_000 <= opened.onset_step < 1_015 and opened.value == pytest.approx(0.2, rel=0.2)


def test_evaluations_and_checkpoints_are_no_slowdown() -> None:
    seconds = 0.1 * norms(10_000, spread=0.1)
    seconds[::100] = 30.0
    seconds[50::1000] = 300.0
    assert found("throughput_drop", {"step_seconds": seconds}) == []


@pytest.mark.parametrize("points", [1, 100, 300, 1_000])
@pytest.mark.parametrize("spread", [0.03, 0.3])
@pytest.mark.parametrize(("kind", "name"), [("grad_norm", "grad_norm"), ("throughput_drop", "step_seconds")])
def test_a_rise_counts_neither_as_its_own_past_nor_as_its_own_noise(
    kind: str, name: str, spread: float, points: int
) -> None:
    """A rise by a factor of 8, at once or over many points, is one alarm that begins before it is over."""
    rise = 8.0 ** np.clip((np.arange(4_000) - 800) / points, 0.0, 1.0)
    for seed in range(3):
        opened, *rest = found(kind, {name: rise * norms(4_000, seed, spread)})
        assert 800 <= opened.onset_step <= opened.step <= 800 + points + 100
        assert [finding.opened for finding in rest] in ([], [False])


def test_a_rise_that_begins_in_the_warm_up_of_the_detector_is_found() -> None:
    rise = 40.0 ** np.clip((np.arange(2_000) - 150) / 1_750, 0.0, 1.0)
    for kind, name in (("grad_norm", "grad_norm"), ("throughput_drop", "step_seconds")):
        assert found(kind, {name: rise * norms(2_000, spread=0.3)})[0].step < 1_300


def test_a_lasting_slowdown_is_reported_once() -> None:
    seconds = 0.1 * norms(10_000, spread=0.05)
    seconds[1_000:] *= 2.0
    opened, closed = found("throughput_drop", {"step_seconds": seconds})
    assert opened.opened and not closed.opened


def test_a_wait_for_data_is_found() -> None:
    steps = 1_000
    parts = {name: np.full(steps, seconds) for name, seconds in PARTS.items()}
    wait = np.full(steps, 0.002)
    wait[100] = 5.0
    assert found("data_wait", {"time_data": wait, **parts}, share=0.9) == []
    wait[100] = 0.002
    for pause in (3.0, 30.0, 8 * 3600.0):
        wait[400::500] = pause
        assert found("data_wait", {"time_data": wait, **parts}) == []
    wait[400::500] = 0.002
    wait[400:600] = 0.1
    opened, closed = found("data_wait", {"time_data": wait, **parts})
    assert 350 <= opened.onset_step <= 420 and opened.threshold == 0.3
    assert "Steps wait for data" in opened.message and not closed.opened


def test_a_wait_that_wavers_about_the_limit_is_one_alert() -> None:
    steps = 3_000
    parts = {name: np.full(steps, seconds) for name, seconds in PARTS.items()}
    others = sum(PARTS.values())
    # Shares from 29 % to 31 %, over and over; then none.
    share = 0.30 + 0.01 * np.sin(np.arange(steps) / 60)
    share[2_500:] = 0.05
    changes = found("data_wait", {**parts, "time_data": others * share / (1 - share)})
    assert [change.opened for change in changes] == [True, False]
    assert changes[1].step > 2_500


@pytest.mark.parametrize("slow", [0, 3, 20])
def test_a_slow_start_and_a_hiccup_soon_after_are_no_wait_for_data(slow: int) -> None:
    """Workers that start for a minute, or one long pause before much is known."""
    parts = {name: np.full(400, value) for name, value in PARTS.items()}
    wait = np.full(400, 0.002)
    wait[slow] = 60.0
    assert found("data_wait", {**parts, "time_data": wait}) == []
    waits = np.full(400, 0.1)
    waits[slow] = 60.0
    assert [finding.opened for finding in found("data_wait", {**parts, "time_data": waits})] == [True]


def test_memory_that_rises_steadily_is_found_and_caches_are_not() -> None:
    noise = np.random.default_rng(0).uniform(0.0, 2**26, 2_000)
    base = 2.0**32 + noise
    filling = base + 2.0**31 * (1.0 - np.exp(-np.arange(2_000) / 30.0))
    assert found("memory_creep", {"memory_rss": filling}) == []
    leak = base + 2.0**20 * np.arange(2_000)
    (opened,) = found("memory_creep", {"memory_rss": leak})
    assert opened.step < 60 * 13 and opened.message.startswith(
        "The main memory in use rises steadily since step"
    )


def test_mapped_files_in_the_cache_are_no_creep_and_a_leak_beside_them_is() -> None:
    base = 2.0**32 + np.random.default_rng(0).uniform(0.0, 2**26, 2_000)
    growing = base + 2.0**20 * np.arange(2_000)
    assert found("memory_creep", {"memory_rss": growing, "memory_anonymous": base}, (100, 700)) == []
    (opened,) = found("memory_creep", {"memory_rss": growing, "memory_anonymous": growing})
    assert opened.message.startswith("The main memory")


def test_main_memory_that_rises_beside_a_gpu_is_found() -> None:
    base = 2.0**32 + np.random.default_rng(0).uniform(0.0, 2**26, 2_000)
    growing = base + 2.0**20 * np.arange(2_000)
    (host,) = found("memory_creep", {"memory_anonymous": growing, "memory_allocated": base})
    assert host.message.startswith("The main memory")
    (device,) = found("memory_creep", {"memory_anonymous": base, "memory_allocated": growing})
    assert device.message.startswith("The GPU memory")


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["memory_allocated", "memory_anonymous", "memory_rss"])
def test_the_evidence_shows_the_memory_that_rises(name: str) -> None:
    run = make_run(create_project("default", "Default"))
    memory = 2.0**32 * (1.0 + 0.001 * np.arange(800))
    Recorder(run=run).rows(np.arange(800), {"loss": np.full(800, 2.0), name: memory})
    (event,) = evaluate(run.id)
    assert event.kind == "memory_creep"
    assert [series["name"] for series in event.evidence["series"]] == [name, "loss"]


@pytest.mark.parametrize("kind", list(SCALAR_DETECTORS))
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 600), max_size=4), seed=st.integers(0, 50))
def test_the_result_does_not_depend_on_the_batches(kind: str, cuts: list[int], seed: int) -> None:
    values = norms(600, seed, spread=1.0)
    values[300:400] *= 20.0
    values[::50] = np.nan
    values[350:360] = np.inf
    scalars = {"grad_norm": values, "step_seconds": values, "memory_rss": values, "time_data": values}
    scalars |= {name: np.full(600, seconds) for name, seconds in PARTS.items()}
    parameters: dict[str, dict[str, Any]] = {
        "memory_creep": {"points": 5.0, "blocks": 2.0, "rise": 0.0},
        "data_wait": {"points": 5.0},
    }
    given_parameters: dict[str, Any] = parameters.get(kind, {"window": 20.0, "points": 3.0})
    whole = found(kind, scalars, **given_parameters)
    assert found(kind, scalars, cuts, **given_parameters) == whole
