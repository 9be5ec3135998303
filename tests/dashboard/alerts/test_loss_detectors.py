"""Detectors of the loss of one run, whose findings do not depend on the batches."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import (
    ConditionChange,
    LossDetector,
    State,
    divergence,
    not_finite,
    spike,
)

DETECTORS: dict[str, LossDetector] = {
    "loss_not_finite": not_finite,
    "loss_spike": spike,
    "loss_divergence": divergence,
}


def run(
    kind: str, losses: np.ndarray, *, cuts: tuple[int, ...] = (), steps: np.ndarray | None = None
) -> list[ConditionChange]:
    """All findings. The losses are split into batches at `cuts`; the state goes through JSON in between."""
    steps = np.arange(len(losses)) if steps is None else steps
    state: State = {}
    findings = []
    edges = [0, *sorted(cuts), len(losses)]
    for first, last in zip(edges, edges[1:], strict=False):
        state = json.loads(json.dumps(state, allow_nan=False))
        state, new = DETECTORS[kind](state, steps[first:last], losses[first:last], rules.validate(kind, {}))
        findings += new
    json.dumps([finding.evidence for finding in findings], allow_nan=False)
    return findings


def noisy(n: int = 400, sd: float = 0.02, seed: int = 0) -> np.ndarray:
    steps = np.arange(n)
    return 2.0 + 3.0 * np.exp(-steps / 50.0) + np.random.default_rng(seed).normal(0.0, sd, n)


def test_it_works() -> None:
    losses = noisy()
    losses[118:] = math.nan
    (finding,) = run("loss_not_finite", losses)
    assert finding.opened and finding.onset_step == finding.step == 118 and finding.value is None
    assert finding.message == f"Loss became NaN at step 118; before, it was {losses[117]:.4g}."


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_loss_has_no_findings(kind: str, seed: int) -> None:
    assert run(kind, noisy(seed=seed)) == []


@pytest.mark.parametrize(
    ("value", "word"), [(math.inf, "infinity"), (-math.inf, "minus infinity"), (1e150, "1e150")]
)
def test_infinite_and_huge_losses_are_not_finite(value: float, word: str) -> None:
    (finding,) = run("loss_not_finite", np.array([2.0, value]))
    assert finding.value is None and word in finding.message


def test_the_message_says_that_the_first_loss_is_nan() -> None:
    assert "its first logged value" in run("loss_not_finite", np.array([math.nan]))[0].message


def test_a_lasting_nan_opens_once_and_closes_once() -> None:
    losses = np.full(100, 2.0)
    losses[10:40] = math.nan
    losses[45] = math.inf
    opened, closed = run("loss_not_finite", losses)
    assert (opened.opened, opened.onset_step, opened.step) == (True, 10, 10)
    assert (closed.opened, closed.onset_step, closed.step) == (False, 10, 65)


@pytest.mark.parametrize("length", [3, 5, 30])
def test_a_spike_is_found_at_its_third_point_and_closed_after(length: int) -> None:
    losses = noisy()
    losses[200 : 200 + length] += 1.0
    opened, closed = run("loss_spike", losses)
    assert (opened.onset_step, opened.step) == (200, 202)
    assert opened.value is not None and opened.threshold is not None and opened.value > opened.threshold
    assert not closed.opened and 200 + length < closed.step < 230 + length


def test_two_high_points_are_not_a_spike() -> None:
    losses = noisy()
    losses[[200, 201, 203, 204]] += 1.0
    assert run("loss_spike", losses) == []


def test_a_spike_does_not_raise_its_own_limit() -> None:
    losses = noisy()
    losses[200:240] += 1.0
    opened, closed = run("loss_spike", losses)
    assert opened.onset_step == 200 and 240 < closed.step < 252


@pytest.mark.parametrize("kind", ["loss_spike", "loss_divergence"])
def test_a_lasting_shift_closes_and_a_later_rise_is_found(kind: str) -> None:
    losses = noisy(2000)
    losses[600:] *= 1.4
    losses[1400:] *= 1.3
    opened, closed, *later = run(kind, losses)
    assert opened.opened and 600 <= opened.onset_step <= opened.step < 640
    assert not closed.opened and closed.step < 1000
    assert later[0].opened and 1400 <= later[0].onset_step <= later[0].step < 1440


def every(spacing: int, losses: np.ndarray, offset: int = 0) -> list[ConditionChange]:
    """The findings of a run that logs only every so many steps."""
    steps = np.arange(len(losses))[offset::spacing]
    return run("loss_spike", losses[steps], steps=steps)


@pytest.mark.parametrize("offset", range(5))
def test_a_spike_of_ten_steps_is_found_where_every_fifth_is_logged(offset: int) -> None:
    losses = noisy(2000)
    losses[1000:1010] += 1.0
    opened, closed = every(5, losses, offset)
    assert 1000 <= opened.onset_step <= 1004 and opened.step == opened.onset_step + 5
    assert opened.value is not None and opened.threshold is not None and opened.value > opened.threshold
    assert not closed.opened


def test_a_spike_that_decays_is_found_where_every_fifth_step_is_logged() -> None:
    """The second logged point is above half of the limit only."""
    losses = noisy(2000)
    losses[1000:1010] += 0.6 * np.exp(-np.arange(10) / 5.0)
    assert every(5, losses)[0].onset_step == 1000


@pytest.mark.parametrize("spacing", [2, 5, 10])
def test_single_hard_batches_are_no_spike_where_few_steps_are_logged(spacing: int) -> None:
    losses = noisy(4000)
    losses[np.arange(500, 3900, 97)] += 1.5
    for offset in range(spacing):
        assert every(spacing, losses, offset) == []


def test_two_hard_batches_in_a_row_are_no_spike_in_a_run_that_has_many() -> None:
    losses = noisy(4000)
    losses[np.arange(300, 3900, 60)] += 1.5
    losses[[3300, 3305]] += 1.5
    assert every(5, losses) == []


def test_a_fall_is_not_a_spike() -> None:
    losses = noisy()
    losses[200:] -= 1.0
    assert run("loss_spike", losses) == []


def test_a_change_of_the_last_digit_is_not_a_spike() -> None:
    losses = np.full(400, 2.31)
    losses[200:210] = 2.32
    assert run("loss_spike", losses) == []
    losses[300:310] = 2.7
    assert run("loss_spike", losses)[0].onset_step == 300


def test_divergence_is_found_with_its_onset() -> None:
    losses = noisy()
    losses[250:] += np.linspace(0.0, 4.0, 150)
    (finding,) = run("loss_divergence", losses)
    assert 250 < finding.onset_step < 280 and finding.step - finding.onset_step < 25
    assert finding.value is not None and finding.threshold is not None and finding.value > finding.threshold
    assert "rose from a level of" in finding.message and "% higher" in finding.message


@pytest.mark.parametrize("change", [200, 1000, 10_000])
def test_a_rise_of_one_nat_is_found_within_forty_points(change: int) -> None:
    losses = 3.0 + 0.05 * np.random.default_rng(1).normal(size=change + 200)
    losses[change:] += 1.0
    finding = run("loss_divergence", losses)[0]
    assert change <= finding.onset_step <= finding.step < change + 40


def early_curve(at: int, rise: np.ndarray | float, first: float = 4.5) -> np.ndarray:
    """A loss that learns from `first` on, and leaves its course at a step."""
    steps = np.arange(400)
    losses = 1.5 + (first - 1.5) * np.exp(-steps / 30.0)
    losses += np.random.default_rng(at).normal(0.0, 0.05, len(steps))
    losses[at:] += rise
    return losses


@pytest.mark.parametrize("at", [3, 7, 20, 63, 90, 100])
def test_an_early_divergence_is_found_at_its_onset(at: int) -> None:
    """Before, nothing was judged in the first 104 points, and the onset was where that began."""
    finding = run("loss_divergence", early_curve(at, 136.0))[0]
    assert finding.opened and finding.onset_step == at and finding.step <= at + 12
    assert "judged against the first losses, of about" in finding.message


@pytest.mark.parametrize("at", [25, 40, 63, 90])
def test_an_early_loss_of_what_was_learned_is_a_divergence(at: int) -> None:
    finding = run("loss_divergence", early_curve(at, 3.0))[0]
    assert finding.onset_step == at and finding.step <= at + 12


def test_a_loss_that_explodes_from_its_first_steps_is_found() -> None:
    losses = np.full(60, 2.4e10)
    losses[:6] = [4.2, 4.5, 8.0, 60.0, 3e3, 1e6]
    finding = run("loss_divergence", losses)[0]
    assert finding.onset_step in (2, 3) and finding.step < 20 and "times as high" in finding.message


def test_a_loss_that_explodes_at_its_second_step_is_found() -> None:
    """Before, the first two losses were accepted whatever they were."""
    losses = np.concatenate([[2.86, 5614.0, 18809.0], np.linspace(12000.0, 900.0, 18)])
    finding = run("loss_divergence", losses)[0]
    assert finding.onset_step == 1 and finding.step < 14


def renewed_targets(every: int, seed: int, gain: float = 0.97) -> np.ndarray:
    """The loss of a value function that is trained on its own predictions, which are renewed at times.

    The first target is the reward of 1. Each renewal adds nearly another reward to the targets, so that the
    loss is about 1 again, and falls as the first time.
    """
    steps = np.arange(600)
    losses = gain ** (steps // every) * np.exp(-(steps % every) / 18.0) + 0.03
    return np.asarray(losses * np.exp(0.2 * np.random.default_rng(seed).normal(size=len(steps))))


@pytest.mark.parametrize("every", [50, 80, 125])
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_whose_targets_are_renewed_is_no_divergence(every: int, seed: int) -> None:
    assert run("loss_divergence", renewed_targets(every, seed)) == []


def own_rises(chance: np.random.Generator) -> dict[str, np.ndarray]:
    """Losses that rise from their first point on, or have no scale, by the name of their kind."""
    steps = np.arange(400.0)
    noise = chance.normal(size=400)
    return {
        "from 0, straight": 0.05 * steps + 0.1 + 0.05 * noise,
        "large, ever slower": 120.0 * (1.0 - np.exp(-steps / 12.0)) + 8.0 + noise,
        "from 0, ever slower": 6.0 * (1.0 - np.exp(-steps / 12.0)) + 0.2 + 0.1 * noise,
        "from 0, with the square": 0.1 + 1e-3 * steps**2 + 0.05 * noise,
        "slower, then again": 5.0 * (1.0 - np.exp(-steps / 8.0)) + 0.3 + 0.0002 * steps**2 + 0.1 * noise,
        "through 0": -1.0 + 0.05 * steps + 0.2 * noise,
        "about 0": 0.5 * noise,
    }


@pytest.mark.parametrize("name", own_rises(np.random.default_rng(0)))
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_rises_by_itself_is_no_divergence(name: str, seed: int) -> None:
    """The losses of actors and value functions in reinforcement learning."""
    assert run("loss_divergence", own_rises(np.random.default_rng(seed))[name]) == []


@pytest.mark.parametrize("name", ["from 0, straight", "from 0, ever slower", "through 0"])
@pytest.mark.parametrize("at", [30, 63, 200])
def test_a_loss_that_rises_by_itself_can_diverge(name: str, at: int) -> None:
    losses = own_rises(np.random.default_rng(0))[name]
    losses[at:] += 1000.0
    finding = run("loss_divergence", losses)[0]
    assert finding.onset_step == at and finding.step < at + 25


def test_a_loss_that_grows_without_end_is_found() -> None:
    """By half in each 20 points."""
    noise = np.random.default_rng(0).normal(size=600)
    losses = 2.0 * 1.5 ** (np.arange(600.0) / 20.0) * np.exp(0.05 * noise)
    assert run("loss_divergence", losses)[0].step < 300


def test_a_jump_of_what_was_learned_is_found_at_step_63() -> None:
    losses = 2.6 + 8.4 * np.exp(-np.arange(300) / 15.0)
    losses += np.random.default_rng(0).normal(0.0, 0.05, 300)
    losses[63:] = 138.7
    finding = run("loss_divergence", losses)[0]
    assert finding.onset_step == 63 and finding.step <= 75


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_rises_after_initialisation_is_no_divergence(seed: int) -> None:
    """It rises by 60 % for ten steps, or to five times its first value for four."""
    steps = np.arange(600)
    noise = np.random.default_rng(seed).normal(0.0, 0.1, len(steps))
    for hump in (6.5 * np.exp(-0.5 * ((steps - 6) / 3.0) ** 2), 44.0 * ((steps > 1) & (steps < 6))):
        assert run("loss_divergence", 4.0 + 7.0 * np.exp(-steps / 60.0) + hump + noise) == []


def test_an_early_divergence_that_recovers_closes_and_a_later_one_is_found() -> None:
    losses = np.concatenate([early_curve(40, 10.0)[:70], early_curve(399, 0.0)[40:]])
    losses[300:] += 4.0
    opened, closed, again = run("loss_divergence", losses)
    assert opened.onset_step == 40 and 70 < closed.step < 100 and not closed.opened
    assert again.opened and 300 <= again.onset_step < 305


def test_a_slow_divergence_is_found() -> None:
    """By 40 % over half of the run."""
    losses = noisy(4000)
    losses[2000:] *= 1.0 + np.linspace(0.0, 0.4, 2000)
    finding = run("loss_divergence", losses)[0]
    assert finding.opened and 1500 < finding.onset_step < 2400 and finding.step < 3900


def test_a_rise_that_began_slowly_is_not_its_own_noise() -> None:
    """The loss of the demo's faulty run: it creeps up, then rises by a third. 4 of 20 were found before."""
    steps = np.arange(1, 601)
    course = np.interp(
        steps, [1, 30, 60, 120, 240, 320, 345, 380, 600], [4.0, 3.0, 2.6, 2.45, 2.13, 2.28, 2.5, 2.95, 2.8]
    )
    opened = []
    for seed in range(20):
        losses = course + 0.12 * np.random.default_rng(seed).normal(size=600)
        findings = divergence({}, steps, losses, rules.validate("loss_divergence", {}))[1]
        opened += [finding.step for finding in findings if finding.opened]
    assert len(opened) >= 18 and all(345 < step < 420 for step in opened)


def test_divergence_closes_when_the_loss_recovers() -> None:
    losses = noisy()
    losses[200:280] += 1.0
    opened, closed = run("loss_divergence", losses)
    assert opened.opened and not closed.opened and 280 < closed.step < 330
    assert "is back at" in closed.message


def test_divergence_depends_on_the_noise_of_the_loss() -> None:
    """A rise of 30 % is a divergence of a loss with little noise, but not of one with much noise."""
    for sd, diverges in ((0.005, True), (0.5, False)):
        losses = 2.0 + np.random.default_rng(0).normal(0.0, sd, 600)
        losses[300:] += 0.6
        assert bool(run("loss_divergence", losses)) is diverges


STEPS = np.arange(3000)
PLATEAU = 2.0 + 3.0 * np.exp(-STEPS / 300.0)


def correlated(chance: np.random.Generator, phi: float) -> np.ndarray:
    noise = chance.normal(size=len(STEPS) + 500) * math.sqrt(1.0 - phi * phi)
    return np.asarray(lfilter([1.0], [1.0, -phi], noise)[500:])


def restarts(count: int) -> np.ndarray:
    phase = STEPS % (len(STEPS) // count) / (len(STEPS) // count)
    return np.asarray(1.0 + 0.1 * 0.5 * (1.0 + np.cos(np.pi * phase)))


def healthy_rises(chance: np.random.Generator) -> dict[str, np.ndarray]:
    """Relative deviations of a healthy loss from its course."""
    return {
        **{f"AR(1) {phi}": 0.03 * correlated(chance, phi) for phi in (0.5, 0.9, 0.99)},
        **{f"{count} restarts": restarts(count) - 1.0 for count in (2, 4, 8)},
        "heavy tails": 0.01 * chance.standard_t(2, len(STEPS)),
        "another mixture": np.where(STEPS < 1500, 0.0, 0.05),
        "two sources": np.where(STEPS // 50 % 2, 0.1, 0.0),
        "hump of the warm-up": 0.2 * np.exp(-0.5 * ((STEPS - 150) / 40.0) ** 2),
        "ten points": np.where((STEPS >= 1500) & (STEPS < 1510), 0.1, 0.0),
    }


@pytest.mark.parametrize("kind", ["loss_spike", "loss_divergence"])
@pytest.mark.parametrize("name", healthy_rises(np.random.default_rng(0)))
def test_healthy_losses_that_rise_have_no_findings(kind: str, name: str) -> None:
    chance = np.random.default_rng(5)
    for _ in range(3):
        noise = 0.01 * chance.normal(size=len(STEPS))
        assert run(kind, PLATEAU * (1.0 + healthy_rises(chance)[name] + noise)) == []


def test_ten_high_points_are_no_divergence() -> None:
    losses = noisy(1000)
    losses[500:510] += 5.0
    assert run("loss_divergence", losses) == []


@pytest.mark.parametrize("kind", ["loss_spike", "loss_divergence"])
def test_other_detectors_ignore_losses_that_are_not_finite(kind: str) -> None:
    losses = noisy()
    losses[100::7] = math.nan
    losses[101::7] = math.inf
    assert run(kind, losses) == []


@pytest.mark.parametrize("kind", ["loss_spike", "loss_divergence"])
def test_ignores_duplicate_and_rewound_steps(kind: str) -> None:
    losses, steps = noisy(), np.arange(400)
    losses[200:] += 1.0
    again = np.concatenate([steps[:250], steps[180:250], steps[249:]])
    values = np.concatenate([losses[:250], np.full(70, 50.0), losses[249:]])
    assert run(kind, values, steps=again) == run(kind, losses)


def test_gaps_in_the_steps_do_not_matter() -> None:
    losses = noisy()
    losses[200:203] += 1.0
    assert run("loss_spike", losses, steps=np.arange(400) * 10)[0].onset_step == 2000


values = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf, 1e308])), max_size=150
)


@pytest.mark.parametrize("kind", DETECTORS)
@given(values=values, cuts=st.lists(st.integers(0, 150), max_size=5))
def test_the_result_does_not_depend_on_the_batches(kind: str, values: list[float], cuts: list[int]) -> None:
    losses = np.array(values, dtype=np.float64)
    inside = tuple(cut for cut in cuts if cut <= len(losses))
    assert run(kind, losses, cuts=inside) == run(kind, losses)


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_long_run_does_not_depend_on_the_batches(kind: str) -> None:
    losses = noisy(1500)
    losses[500:] *= 1.4
    losses[1000:] *= 1.4
    losses[1200:1210] = math.nan
    findings = run(kind, losses)
    assert findings and run(kind, losses, cuts=(3, 499, 505, 521, 700, 1001, 1013, 1201)) == findings


@pytest.mark.parametrize("kind", DETECTORS)
@given(values=values)
def test_findings_open_and_close_in_turn(kind: str, values: list[float]) -> None:
    findings = run(kind, np.array(values, dtype=np.float64))
    assert [finding.opened for finding in findings] == [i % 2 == 0 for i in range(len(findings))]
    assert all(finding.onset_step <= finding.step for finding in findings)
