"""Saturation of any number of tensors is one finding that names the worst ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import Finding, State, overflow_rates, saturation

PARAMETERS = rules.validate("saturation_rate", {})
NAMES = [f"blocks.{i}.input" for i in range(50)]


def run(rates: np.ndarray, cuts: tuple[int, ...] = (), **parameters: float) -> list[Finding]:
    state: State = {}
    findings = []
    edges = [0, *sorted(cuts), len(rates)]
    for first, last in zip(edges, edges[1:], strict=False):
        state = json.loads(json.dumps(state, allow_nan=False))
        steps, names = np.arange(len(rates))[first:last], NAMES[: rates.shape[1]]
        state, new = saturation(state, steps, rates[first:last], names, {**PARAMETERS, **parameters})
        findings += new
    return findings


def test_it_works() -> None:
    rates = np.zeros((200, 50))
    rates[100:150, 7] = 0.02
    rates[105:150, 9] = 0.05
    opened, closed = run(rates)
    assert (opened.onset_step, opened.step, opened.value, opened.threshold) == (100, 109, 0.05, 0.001)
    assert [tensor["name"] for tensor in opened.evidence["tensors"]] == ["blocks.9.input", "blocks.7.input"]
    assert opened.message == (
        "5 % of blocks.9.input overflowed since step 100, above the limit of 0.1 %; 1 more tensor above it."
    )
    assert (closed.opened, closed.onset_step, closed.step) == (False, 100, 169)


def test_forty_tensors_are_one_finding() -> None:
    rates = np.zeros((200, 50))
    for i in range(40):
        rates[50 + i :, i] = 0.01
    (finding,) = run(rates)
    assert finding.onset_step == 50 and finding.step == 59


def test_the_rate_must_be_exceeded() -> None:
    assert run(np.full((200, 3), PARAMETERS["rate"])) == []


def test_the_first_steps_are_ignored() -> None:
    rates = np.zeros((200, 3))
    rates[: int(PARAMETERS["warmup"])] = 1.0
    assert run(rates) == []
    assert run(rates, warmup=0)[0].onset_step == 0


def test_isolated_steps_of_a_delayed_scale_are_not_enough() -> None:
    rates = np.zeros((400, 3))
    rates[20::10] = 0.5
    assert run(rates) == []
    rates[20::10] = 0.0
    rates[20:29] = 0.5
    assert run(rates) == []


def test_steps_without_an_observation_neither_count_nor_interrupt() -> None:
    rates = np.full((200, 2), math.nan)
    rates[20::10, 0] = 0.5
    (finding,) = run(rates)
    assert (finding.onset_step, finding.step) == (20, 110)


def test_rates_include_nonfinite_and_are_nan_where_not_observed() -> None:
    saturated = np.array([[1.0, 2.0, math.nan, 0.0]])
    nonfinite = np.array([[1.0, math.nan, 1.0, 0.0]])
    numel = np.array([[10.0, 10.0, 10.0, 0.0]])
    assert overflow_rates(saturated, nonfinite, numel) == pytest.approx(
        np.array([[0.2, 0.2, math.nan, math.nan]]), nan_ok=True
    )
    assert overflow_rates(saturated, None, numel)[0, 0] == 0.1


def test_tensors_may_be_added() -> None:
    state: State = {}
    state, _ = saturation(state, np.arange(30), np.zeros((30, 2)), NAMES[:2], PARAMETERS)
    rates = np.zeros((30, 5))
    rates[:, 4] = 0.3
    _, (finding,) = saturation(state, np.arange(30, 60), rates, NAMES[:5], PARAMETERS)
    assert finding.evidence["tensors"][0]["name"] == NAMES[4]


@given(
    hnp.arrays(np.float64, (60, 4), elements=st.sampled_from([0.0, 0.01, 0.5, math.nan])),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_the_result_does_not_depend_on_the_batches(rates: np.ndarray, cuts: list[int]) -> None:
    parameters = {"points": 3.0, "warmup": 2.0, "recover": 4.0}
    whole, cut = run(rates, (), **parameters), run(rates, tuple(cuts), **parameters)
    assert whole == cut
    assert [finding.opened for finding in whole] == [i % 2 == 0 for i in range(len(whole))]


def test_a_rarely_observed_tensor_keeps_its_alert_open() -> None:
    rates = np.full((2000, 3), np.nan)
    rates[:, 0] = 0.0
    rates[::50, 1] = 0.5
    (opened,) = run(rates)
    assert opened.opened and opened.value == 0.5
    rates[1500::50, 1] = 0.0
    opened, closed = run(rates)
    assert not closed.opened and closed.step == 1500 + PARAMETERS["recover"] - 1


def test_a_tensor_that_is_no_longer_observed_lets_its_alert_close() -> None:
    rates = np.full((600, 2), np.nan)
    rates[:, 0] = 0.0
    rates[:200, 1] = 0.5
    opened, closed = run(rates)
    assert opened.opened and closed.step == 200 + 100 + PARAMETERS["recover"] - 1
