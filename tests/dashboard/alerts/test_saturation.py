"""Shares of saturated, flushed and non-finite elements, absolute and against a tensor's own past."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.tensors import detected
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import ConditionChange, TensorFacts, overflow_rates
from fp8scope_dashboard.alerts.detectors.tensor_alarm import layers_in

PARAMETERS = rules.validate("saturation_rate", {})


def run(rates: np.ndarray, cuts: tuple[int, ...] = (), **parameters: Any) -> list[ConditionChange]:
    return detected("saturation_rate", {"saturated": rates * 1_000}, cuts=cuts, **parameters)


def noise(rows: int, n: int, level: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).poisson(level * 1_000, (rows, n)).astype(float)


def test_it_works() -> None:
    rates = np.zeros((200, 50))
    rates[100:150, 7] = 0.02
    rates[105:150, 9] = 0.05
    opened, closed = run(rates)
    assert (opened.onset_step, opened.step, opened.value, opened.threshold) == (100, 109, 0.05, 0.001)
    assert [tensor["name"] for tensor in opened.evidence["tensors"]] == [
        "blocks.9.mlp.input",
        "blocks.7.mlp.input",
    ]
    assert opened.message == (
        "2 tensors in layers 7, 9 overflow, first blocks.7.mlp.input at step 100; the worst: 5 % of "
        "blocks.9.mlp.input, above the limit of 0.1 %."
    )
    assert (closed.opened, closed.onset_step, closed.step) == (False, 100, 169)


def test_forty_tensors_are_one_alarm_that_is_completed() -> None:
    rates = np.zeros((200, 50))
    for i in range(40):
        rates[50 + i :, i] = 0.01
    first, *updates = run(rates)
    assert (first.onset_step, first.step, first.update) == (50, 59, False)
    assert updates and all(each.update and each.onset_step == 50 for each in updates)
    assert updates[-1].evidence["tensors_over"] == 40
    assert updates[-1].message.startswith(
        "40 tensors in layers 0-39 overflow, first blocks.0.mlp.input at step 50"
    )


def test_a_later_cause_is_another_alarm_while_the_first_lasts() -> None:
    rates = np.zeros((2_000, 5))
    rates[50:, 0] = 0.01
    rates[1_000:1_500, 3] = 0.02
    first, second, end = run(rates)
    assert (first.onset_step, first.evidence["tensors_over"]) == (50, 1)
    assert (second.onset_step, second.update, second.evidence["tensors_over"]) == (1_000, False, 1)
    assert (end.opened, end.onset_step) == (False, 1_000)


def test_a_tensor_that_has_recovered_leaves_its_alarm_and_may_open_another() -> None:
    rates = np.zeros((2_000, 5))
    rates[50:, 0] = 0.01
    rates[60:100, 1] = 0.01
    rates[1_000:, 1] = 0.01
    onsets = [finding.onset_step for finding in run(rates) if finding.opened and not finding.update]
    assert onsets == [50, 1_000]


def test_the_onset_of_a_sampled_tensor_is_an_interval() -> None:
    rates = np.full((2_000, 1), math.nan)
    rates[::100] = 0.0
    rates[900::100] = 0.02
    (opened,) = run(rates)
    assert opened.message.startswith("blocks.0.mlp.input overflows since step 801–900: 2 %")
    assert run(rates, cuts=(850, 900, 901)) == [opened]


def test_the_rate_must_be_exceeded() -> None:
    assert run(np.full((200, 3), PARAMETERS["rate"])) == []


def test_the_first_steps_are_ignored() -> None:
    rates = np.zeros((200, 3))
    rates[: int(PARAMETERS["warmup"])] = 1.0
    assert run(rates) == []
    assert run(rates, warmup=0)[0].onset_step == 0


def test_isolated_steps_of_a_delayed_scale_are_not_enough() -> None:
    rates = np.zeros((4_000, 3))
    rates[20::15] = 0.5
    assert run(rates) == []
    rates[20::15] = 0.0
    rates[20:29] = 0.5
    assert run(rates) == []


@pytest.mark.parametrize(("period", "within"), [(2, 25), (3, 40), (5, 80), (10, 400)])
def test_an_intermittent_overflow_is_found_and_stays_open(period: int, within: int) -> None:
    rates = np.zeros((3_000, 5))
    rates[1_000:2_000:period, 2] = 0.05
    opened, closed = run(rates)
    assert (opened.onset_step, opened.evidence["tensors_over"]) == (1_000, 1)
    assert opened.step < 1_000 + within and not closed.opened and 2_000 < closed.step < 2_050
    assert run(rates, cuts=tuple(range(900, 1_500, 7))) == [opened, closed]


def test_an_overflow_that_is_small_on_average_is_no_alarm() -> None:
    """The scale of the latest step clips after each louder batch."""
    rates = np.zeros((4_000, 3))
    rates[20::2] = 0.0015
    assert run(rates) == []
    rates[20::2] = 0.004
    assert run(rates)


def test_single_elements_of_a_small_tensor_are_no_overflow() -> None:
    counts = np.zeros((4_000, 3))
    counts[20:, 1] = 3.0
    columns = {"saturated": counts, "numel": np.full(counts.shape, 500.0)}
    assert detected("saturation_rate", columns) == []
    counts[20:, 1] = 4.0
    assert detected("saturation_rate", columns)


def test_an_intermittent_overflow_at_random_is_one_alert() -> None:
    random = np.random.default_rng(5)
    rates = np.zeros((6_000, 4))
    rates[1_000:5_000, 1] = 0.05 * (random.random(4_000) < 0.2)
    opened, closed = run(rates)
    assert 1_000 <= opened.onset_step < opened.step < 1_150 and 4_900 < closed.step < 5_250


def test_blips_before_do_not_move_the_onset_of_a_lasting_overflow() -> None:
    rates = np.zeros((400, 2))
    rates[[92, 96]] = 0.05
    rates[100:, 0] = 0.05
    (opened,) = run(rates)
    assert (opened.onset_step, opened.step, opened.evidence["tensors_over"]) == (100, 109, 1)


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_rare_overflows_at_random_are_no_alarm(share: float) -> None:
    assert run(0.05 * (np.random.default_rng(6).random((20_000, 50)) < share)) == []


def test_nan_in_every_second_or_tenth_step_is_found() -> None:
    for period, within in ((2, 12), (10, 170)):
        nonfinite = np.zeros((600, 2))
        nonfinite[100::period, 1] = 3.0
        (opened,) = detected("tensor_not_finite", {"nonfinite": nonfinite})
        assert opened.onset_step == 100 and opened.step < 100 + within
    # GradScaler tries a larger loss scale from time to time.
    nonfinite = np.zeros((6_000, 2))
    nonfinite[100::50] = 3.0
    assert detected("tensor_not_finite", {"nonfinite": nonfinite}) == []


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


@given(
    hnp.arrays(np.float64, (60, 4), elements=st.sampled_from([0.0, 0.01, 0.5, math.nan])),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_the_result_does_not_depend_on_the_batches(rates: np.ndarray, cuts: list[int]) -> None:
    parameters = {"points": 3.0, "warmup": 2.0, "recover": 4.0}
    whole, cut = run(rates, (), **parameters), run(rates, tuple(cuts), **parameters)
    assert whole == cut
    open_alarms = 0
    for finding in whole:
        open_alarms += 0 if finding.update else 1 if finding.opened else -1
        assert open_alarms >= (1 if finding.opened else 0)


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


def test_underflow_of_most_elements_is_found() -> None:
    underflow = np.full((200, 3), 20.0)
    underflow[80:, 1] = 700.0
    (opened,) = detected("underflow_rate", {"underflow": underflow})
    assert (opened.onset_step, opened.value) == (80, 0.7)
    assert "70 % of blocks.1.mlp.input becomes zero" in opened.message


def test_a_lasting_nan_in_a_tensor_is_found_and_a_single_step_is_not() -> None:
    nonfinite = np.zeros((100, 3))
    nonfinite[20] = 5.0
    nonfinite[60:, 2] = 1.0
    (opened,) = detected("tensor_not_finite", {"nonfinite": nonfinite})
    assert (opened.onset_step, opened.step) == (60, 62)
    # The search for a loss scale; what lasts longer is found.
    nonfinite[:] = 0.0
    nonfinite[:8] = 5.0
    assert detected("tensor_not_finite", {"nonfinite": nonfinite}) == []
    nonfinite[:20] = 5.0
    assert detected("tensor_not_finite", {"nonfinite": nonfinite})[0].step == 14


def risen(kind: str, rates: np.ndarray, **parameters: Any) -> list[ConditionChange]:
    """The findings of a rule of rises in tensors of a million elements."""
    statistic = "saturated" if kind == "saturation_rise" else "underflow"
    columns = {statistic: rates * 1e6, "numel": np.full(rates.shape, 1e6)}
    return detected(kind, columns, **parameters)


def test_a_rate_far_above_its_own_past_is_found_below_the_absolute_limit() -> None:
    rates = noise(1_000, 8, 0.05) / 1e6
    rates[600:, 5] += 0.0009
    assert run(rates) == []
    (opened, *_) = risen("saturation_rise", rates)
    assert (opened.onset_step, opened.step) == (600, 609)
    assert opened.evidence["tensors"][0]["name"] == "blocks.5.mlp.input"


def test_a_lasting_new_level_is_the_past_after_some_time() -> None:
    rates = noise(8_000, 4, 0.02) / 1_000
    rates[1_000:] += 0.2
    opened, closed = risen("underflow_rise", rates)
    assert opened.onset_step == 1_000 and opened.evidence["tensors_over"] == 4
    assert not closed.opened and closed.step < 4_000
    rates[6_000:] += 0.5
    onsets = [finding.onset_step for finding in risen("underflow_rise", rates)]
    assert onsets[:3] == [1_000, 1_000, 6_000]


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.6])
@pytest.mark.parametrize(
    ("kind", "low", "high", "steps"),
    [("saturation_rise", 0.0, 0.0009, 1_000), ("underflow_rise", 0.02, 0.45, 2_000)],
)
def test_a_slow_ramp_is_found(kind: str, low: float, high: float, steps: int, spread: float) -> None:
    noise = np.exp(spread * np.random.default_rng(4).normal(size=(4_000, 4)))
    ramp = low + (high - low) * np.clip((np.arange(4_000) - 1_000) / steps, 0.0, 1.0)
    rates = np.full((4_000, 4), low)
    rates[:, 2] = ramp
    opened, *_ = risen(kind, np.clip(rates * noise, 0.0, 1.0))
    assert opened.evidence["tensors"][0]["name"] == "blocks.2.mlp.input"
    assert 1_000 < opened.onset_step < opened.step < 1_000 + 0.4 * steps


def slow_noise(phi: float, tensors: int = 100) -> np.ndarray:
    """AR(1) noise of standard deviation 1."""
    random = np.random.default_rng(7)
    values = np.empty((4_000, tensors))
    values[0] = random.normal(size=tensors)
    for row in range(1, len(values)):
        values[row] = phi * values[row - 1] + np.sqrt(1.0 - phi**2) * random.normal(size=tensors)
    return values


HEALTHY = {
    "white": lambda level: level * np.exp(0.6 * slow_noise(0.0)),
    "serially correlated": lambda level: level * np.exp(0.6 * slow_noise(0.9)),
    "slow": lambda level: level * np.exp(0.3 * slow_noise(0.99)),
    "heavy tails": lambda level: level * (1.0 + np.abs(np.random.default_rng(8).standard_t(2, (4_000, 100)))),
    "recalibrated": lambda level: (
        level * (1.0 + 3.0 * ((np.arange(4_000)[:, None] + 7 * np.arange(100)) % 500) / 500)
    ),
    "warm-up": lambda level: level * (1.0 + np.clip(np.arange(4_000) / 1_000, 0.0, 1.0))[:, None],
    "settling": lambda level: level * (1.0 + 9.0 * np.exp(-np.arange(4_000) / 300))[:, None],
}


@pytest.mark.parametrize("healthy", HEALTHY)
@pytest.mark.parametrize("kind", ["saturation_rise", "underflow_rise"])
def test_a_healthy_rate_is_no_rise(kind: str, healthy: str) -> None:
    for level in (3e-5, 3e-3) if kind == "saturation_rise" else (0.02, 0.1):
        rates = np.broadcast_to(np.clip(HEALTHY[healthy](level), 0.0, 1.0), (4_000, 100))
        assert risen(kind, rates) == []


def test_impossible_counts_do_not_blind_the_rule() -> None:
    rates = noise(1_000, 3, 0.05) / 1e6
    rates[[50, 150], 1] = -5.0, math.inf
    rates[600:, 1] += 0.0009
    opened, *_ = risen("saturation_rise", rates)
    assert opened.evidence["tensors"][0]["name"] == "blocks.1.mlp.input"


def test_a_slow_drift_of_underflow_is_no_rise() -> None:
    drift = np.linspace(0.0, 0.3, 5_000)[:, None]
    assert risen("underflow_rise", noise(5_000, 50, 0.01) / 1_000 + drift) == []


def test_single_elements_of_a_small_tensor_are_no_rise() -> None:
    assert detected("saturation_rise", {"saturated": noise(5_000, 50, 0.0005)}) == []


@given(
    hnp.arrays(np.float64, (60, 3), elements=st.sampled_from([0.0, 1.0, 5.0, 400.0, math.nan])),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_a_rise_does_not_depend_on_the_batches(counts: np.ndarray, cuts: list[int]) -> None:
    parameters: dict[str, Any] = {"window": 8.0, "points": 2.0, "recover": 3.0}
    whole = detected("underflow_rise", {"underflow": counts}, **parameters)
    assert detected("underflow_rise", {"underflow": counts}, cuts=cuts, **parameters) == whole


def test_tensors_may_be_added() -> None:
    names = [f"blocks.{i}.input" for i in range(5)]
    saturated = np.zeros((60, 5))
    saturated[:30, 2:] = np.nan
    saturated[30:, 4] = 300.0
    (opened,) = detected("saturation_rate", {"saturated": saturated}, facts=TensorFacts.unknown(names))
    assert opened.evidence["tensors"][0]["name"] == names[4]


@pytest.mark.parametrize("points", [100, 300])
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_a_rise_of_a_rate_does_not_count_as_its_own_noise(spread: float, points: int) -> None:
    """By a factor of 16, but below the absolute limit."""
    steps = np.arange(2_000)
    noise = np.exp(spread * np.random.default_rng(3).normal(size=2_000))
    rates = (5e-5 + 7.5e-4 * np.clip((steps - 1_000) / points, 0.0, 1.0)) * noise
    (opened, *_) = risen("saturation_rise", rates[:, np.newaxis])
    assert 1_000 < opened.onset_step < opened.step < 1_000 + points


def test_the_first_tensor_stays_the_first_when_it_pauses_or_recovers() -> None:
    pausing, recovering = np.zeros((2, 200, 20))
    pausing[11:, 3] = 0.02
    pausing[30, 3] = 0.0
    recovering[11:30, 3] = 0.02
    for rates in (pausing, recovering):
        rates[26:, 5] = 0.05
        rates[45:, 6] = 0.05
        for cuts in ((), (31, 60)):
            opened, *updates = (each for each in run(rates, cuts) if each.opened)
            assert opened.onset_step == 11 and updates
            assert all("first blocks.3.mlp.input at step 11;" in update.message for update in updates)


def test_layers_of_several_parts_of_the_model_are_told_apart() -> None:
    names = [f"{part}.{i}.input" for part, i in (("G", 0), ("G", 1), ("G", 2), ("D", 0))]
    assert layers_in(names) == " in layers G.0-2, D.0"
    assert layers_in(names[:3]) == " in layers 0-2"
    assert layers_in(names[3:]) == " in layer 0"
    assert layers_in([*names, "head.input"]) == ""
