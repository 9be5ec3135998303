"""Statistics that rise above their own past: kurtosis, attention logits, expert loads, updates, noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.tensors import Floats, detected
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detection.streams import SAMPLED_READ, TENSOR_DETECTORS
from fp8scope_dashboard.alerts.detectors import ConditionChange, TensorFacts
from fp8scope_dashboard.alerts.kinds.early_signs import EARLY_SIGNS, HEALTHY, KNOWN_ERRORS
from fp8scope_dashboard.analysis.scores.intervals import clopper_pearson

KINDS = {
    "kurtosis_growth": ("kurtosis", 8.0, "outliers"),
    "logit_growth": ("logit_bound", 12.0, "logits"),
    "router_collapse": ("load_imbalance", 0.05, "uneven"),
    "update_growth": ("update_ratio", 1e-3, "update to weight"),
}
EVERY = 10


def healthy(kind: str, samples: int = 200, n: int = 6, seed: int = 0) -> Floats:
    """One sampled step in EVERY, NaN between them: noise of 5 % around a level that falls by half."""
    _, level, _ = KINDS[kind]
    random = np.random.default_rng(seed)
    values = np.full((samples * EVERY, n), math.nan)
    drift = 2.0 ** -np.linspace(0.0, 1.0, samples)[:, None]
    values[::EVERY] = level * drift * np.exp(random.normal(0.0, 0.05, (samples, n)))
    return values


def run(kind: str, values: Floats, cuts: tuple[int, ...] = (), **parameters: Any) -> list[ConditionChange]:
    facts = TensorFacts.unknown([f"blocks.{i}.mlp.input" for i in range(values.shape[1])])
    if kind == "router_collapse":
        values = np.minimum(values, 1.0)
    return detected(kind, {KINDS[kind][0]: values}, facts=facts, cuts=cuts, **parameters)


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_works(kind: str) -> None:
    values = healthy(kind)
    assert run(kind, values) == []
    # 20 % more from one sampled step to the next, from sample 100 on, until sample 120.
    growth = 1.2 ** np.arange(1, 21)
    values[1000:1200:EVERY, 3] *= growth
    values[1200:, 3] = math.nan
    opened = run(kind, values)[0]
    assert opened.opened and 1000 < opened.onset_step <= 1150 and opened.step == opened.onset_step + 20
    assert opened.evidence["tensors"][0]["name"] == "blocks.3.mlp.input"
    # The last sampled step without the condition bounds the onset.
    assert opened.evidence["tensors"][0]["after_step"] == opened.onset_step - EVERY
    assert KINDS[kind][2] in opened.message and "blocks.3.mlp.input" in opened.message


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_ends_when_the_statistic_is_back(kind: str) -> None:
    values = healthy(kind)
    values[1000:1100:EVERY, 3] *= 16.0
    opened, closed = run(kind, values)
    assert (opened.onset_step, opened.step) == (1000, 1020)
    # `recover` counts sampled steps, not rows without a value.
    assert (closed.opened, closed.step) == (False, 1100 + 9 * EVERY)


def test_one_outlier_and_a_slow_drift_are_healthy() -> None:
    values = healthy("kurtosis_growth", samples=600)
    values[2000, :] *= 100.0
    values[3000:3020:EVERY, 2] *= 100.0
    # Doubles over 300 samples.
    values *= 2.0 ** np.linspace(0.0, 2.0, len(values))[:, None]
    assert run("kurtosis_growth", values) == []


def test_a_new_level_is_the_past_after_a_while() -> None:
    values = healthy("logit_growth", samples=600)
    values[2000:, 1] *= 8.0
    opened, closed = run("logit_growth", values)
    assert opened.onset_step == 2000 and not closed.opened
    # What rises from there is news again.
    values[5000:, 1] *= 8.0
    findings = run("logit_growth", values)
    assert [each.onset_step for each in findings if each.opened] == [2000, 5000]


def test_the_beginning_is_not_judged_and_does_not_count_as_the_past() -> None:
    values = healthy("update_growth")
    # A warm-up of the learning rate, from a thousandth, within the ten samples that are left out.
    values[: 10 * EVERY : EVERY] *= np.geomspace(1e-3, 1.0, 10)[:, None]
    values[10 * EVERY : 29 * EVERY : EVERY, 0] *= 8.0
    assert run("update_growth", values) == []
    values = healthy("update_growth")
    values[35 * EVERY :, 0] *= 8.0
    assert run("update_growth", values)[0].onset_step == 35 * EVERY


def test_an_even_load_may_become_a_hundred_times_as_even() -> None:
    values = healthy("router_collapse")
    values[1000:] *= 0.001
    values[1500:] *= 100.0
    assert run("router_collapse", values) == []


def test_noise_to_signal() -> None:
    random = np.random.default_rng(0)
    signal = np.exp(random.normal(0.0, 1.0, (200, 4)))
    error = 0.0008 * signal * np.exp(random.normal(0.0, 0.05, (200, 4)))
    error[100:, 2] *= 10.0
    signal[50, 1] = 0.0
    statistics = {"sq_error": error, "sq_signal": signal}
    opened = detected("noise_growth", statistics)[0]
    assert opened.onset_step == 100 and "loses precision" in opened.message


def test_values_that_are_not_positive_are_not_observed() -> None:
    values = healthy("kurtosis_growth")
    values[1000:1500:EVERY, :3] = np.array([math.inf, 0.0, -1.0])
    assert run("kurtosis_growth", values) == []


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 2000), max_size=5), seed=st.integers(0, 3))
def test_the_division_into_batches_does_not_matter(cuts: list[int], seed: int) -> None:
    values = healthy("logit_growth", seed=seed)
    values[1200:1500, seed] *= 5.0
    assert run("logit_growth", values, tuple(cuts)) == run("logit_growth", values)


def test_every_kind_reads_what_it_needs_and_has_a_known_error() -> None:
    for kind in EARLY_SIGNS:
        assert set(TENSOR_DETECTORS[kind.name].needs) <= set(SAMPLED_READ)
        error = KNOWN_ERRORS[kind.name]
        assert f"{error.alarms} in {HEALTHY} healthy" in kind.description
        assert clopper_pearson(error.alarms, HEALTHY, 0.05).high == pytest.approx(error.at_most, abs=5e-4)
        assert rules.validate(kind.name, {})["points"] == 3
