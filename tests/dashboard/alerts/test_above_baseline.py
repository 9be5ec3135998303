"""The sign e-process: its false-alarm rate by simulation, its delay and its state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from fp8scope_dashboard.alerts.detectors import Finding, State, above_baseline, e_process

ALPHA = 0.05
PARAMETERS = {"margin": 0.0025, "alpha": ALPHA, "block": 2.0, "recover": 10.0}
RUNS, BLOCKS = 1000, 300


def run(
    losses: np.ndarray, baselines: np.ndarray, cuts: tuple[int, ...] = (), **parameters: float
) -> tuple[State, list[Finding]]:
    state: State = {}
    findings = []
    edges = [0, *sorted(cuts), len(losses)]
    for first, last in zip(edges, edges[1:], strict=False):
        part = slice(first, last)
        state = json.loads(json.dumps(state, allow_nan=False))
        steps = np.arange(len(losses))[part]
        state, new = above_baseline(
            state, steps, losses[part], baselines[:, part], {**PARAMETERS, **parameters}
        )
        findings += new
    json.dumps([finding.evidence for finding in findings], allow_nan=False)
    return state, findings


def test_it_works() -> None:
    baseline = np.full((1, 400), 2.0)
    losses = np.where(np.arange(400) < 200, 2.0, 2.02)
    _, (finding,) = run(losses, baseline)
    assert finding.opened and finding.onset_step == 200 and finding.step < 240
    assert finding.value == pytest.approx(0.01)
    # Twice the margin, or what one seed may differ by.
    assert finding.threshold == pytest.approx(0.00545, abs=1e-5)
    assert finding.evidence["e_value"] >= 2 / ALPHA
    assert finding.message.startswith("Loss is above its baseline since about step 200: 1 % over 2 at step")


def median_zero(chance: np.random.Generator) -> np.ndarray:
    """Symmetric with heavy tails: the mean does not exist."""
    return chance.standard_cauchy(BLOCKS)


def skewed(chance: np.random.Generator) -> np.ndarray:
    """Median 0 and mean far above 0: a test of means would raise false alarms."""
    return chance.exponential(1.0, BLOCKS) - math.log(2.0)


def shifting(chance: np.random.Generator) -> np.ndarray:
    """The scale depends on the previous value; the median stays 0."""
    values = np.empty(BLOCKS)
    scale = 1.0
    for i in range(BLOCKS):
        values[i] = scale * chance.normal()
        scale = 5.0 if values[i] > 0 else 0.2
    return values


def alarms(excesses: np.ndarray, alpha: float = ALPHA) -> bool:
    """Whether the evidence of blocks with these excesses, in deviations, ever reaches 1 / alpha."""
    state = e_process.fresh()
    for excess in excesses.tolist():
        e_process.bet(state, excess > 0.0, excess)
        if e_process.wealth(state) >= 1.0 / alpha:
            return True
    return False


@pytest.mark.parametrize("noise", [median_zero, skewed, shifting])
def test_false_alarms_of_signs_are_bounded(noise: Callable[[np.random.Generator], np.ndarray]) -> None:
    """At the edge of the hypothesis (median 0), where alarms are most likely. Only the signs count."""
    chance = np.random.default_rng(7)
    count = sum(alarms(np.sign(noise(chance)) * 1e-3) for _ in range(RUNS))
    # The bound is alpha; five standard errors of a share of RUNS above it would be chance once in 10^6.
    assert count / RUNS <= ALPHA + 5 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def rare(chance: np.random.Generator) -> np.ndarray:
    """Bennett's extreme distribution: mean 0 and variance 1, and rarely as high as counts."""
    high = e_process.MOST_DEVIATIONS
    return np.where(chance.random(BLOCKS) < 1.0 / (high**2 + 1.0), high, -1.0 / high)


@pytest.mark.parametrize("noise", [lambda chance: chance.normal(size=BLOCKS), rare], ids=["normal", "rare"])
def test_false_alarms_of_magnitudes_are_bounded(noise: Callable[[np.random.Generator], np.ndarray]) -> None:
    chance = np.random.default_rng(7)
    count = sum(alarms(noise(chance)) for _ in range(RUNS))
    assert count / RUNS <= ALPHA + 5 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def test_some_alarms_occur_at_the_edge_of_the_hypothesis() -> None:
    """The tests above are not vacuous."""
    chance = np.random.default_rng(8)
    assert 0 < sum(alarms(chance.normal(size=BLOCKS), alpha=0.5) for _ in range(200)) / 200 <= 0.68


def test_the_wealth_is_a_martingale_that_starts_at_one() -> None:
    """With excesses for which Bennett's bound is an equality, the mean of the magnitudes stays 1."""
    high = e_process.MOST_DEVIATIONS
    chances = {high: 1.0 / (high**2 + 1.0), -1.0 / high: high**2 / (high**2 + 1.0)}
    for k in range(1, 5):
        total = 0.0
        for path in range(2**k):
            state, weight = e_process.fresh(), 1.0
            for i in range(k):
                excess = (high, -1.0 / high)[path >> i & 1]
                weight *= chances[excess]
                e_process.bet(state, False, excess)
            magnitudes = state["magnitude"]
            idle = math.log(2.0) / math.log(k + 2.0)
            total += weight * (sum(magnitudes) / len(magnitudes) + idle)
        assert total == pytest.approx(1.0)


def correlated(chance: np.random.Generator, points: int, phi: float) -> np.ndarray:
    noise = chance.normal(size=points + 500) * math.sqrt(1.0 - phi * phi)
    return np.asarray(lfilter([1.0], [1.0, -phi], noise)[500:])


@pytest.mark.parametrize("phi", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seeds", [1, 3])
def test_serially_correlated_noise_raises_few_alarms(phi: float, seeds: int) -> None:
    chance = np.random.default_rng(11)
    wrong = 0
    for _ in range(40):
        arms = 2.0 * (1.0 + 0.02 * np.stack([correlated(chance, 1000, phi) for _ in range(seeds + 1)]))
        wrong += bool(run(arms[0], arms[1:])[1])
    assert wrong <= 2


def test_offsets_of_seeds_that_decay_in_the_warm_up_raise_few_alarms() -> None:
    chance = np.random.default_rng(12)
    steps = np.arange(1000)
    wrong = 0
    for _ in range(40):
        # A seed is ahead or behind by 1 % of its steps: most where the loss falls fast.
        speeds = np.exp(0.01 * chance.normal(size=(2, 1)))
        arms = 2.0 + 8.0 * (1.0 + speeds * steps / 20.0) ** -0.7
        arms *= 1.0 + 0.001 * chance.normal(size=arms.shape)
        wrong += bool(run(arms[0], arms[1:])[1])
    assert wrong <= 2


@pytest.mark.parametrize("seeds", [2, 3, 4])
def test_batch_noise_of_seeds_does_not_hide_a_harm(seeds: int) -> None:
    """Noise that is not shared, 2 % a point, drops out of the products that estimate lasting offsets."""
    chance = np.random.default_rng(13)
    found = 0
    for _ in range(10):
        arms = 2.0 * (1.0 + 0.02 * chance.normal(size=(seeds + 1, 1500)))
        arms[0, 600:] *= 1.02
        found += bool(run(arms[0], arms[1:])[1])
    assert found == 10


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_rise_of_one_per_cent_is_found(seeds: int) -> None:
    chance = np.random.default_rng(14)
    for _ in range(10):
        offsets = 0.0005 * chance.normal(size=(seeds + 1, 1))
        arms = 2.5 * (1.0 + offsets + 0.002 * chance.normal(size=(seeds + 1, 1000)))
        arms[0, 500:] *= 1.01
        _, (finding, *_) = run(arms[0], arms[1:])
        assert 500 <= finding.step < 650


@pytest.mark.parametrize("change", [200, 500, 4000])
def test_a_rise_of_one_nat_is_found_within_forty_points(change: int) -> None:
    chance = np.random.default_rng(15)
    arms = 3.0 * (1.0 + 0.01 * chance.normal(size=(2, change + 100)))
    arms[0, change:] += 1.0
    _, (finding, *_) = run(arms[0], arms[1:])
    assert change - 10 <= finding.onset_step <= change and change <= finding.step < change + 40


def test_seeds_that_differ_lastingly_widen_the_tolerance() -> None:
    chance = np.random.default_rng(3)
    offsets = np.array([[-0.01], [0.0], [0.01]])
    baselines = 1.0 + offsets + chance.normal(0.0, 1e-4, (3, 500))
    losses = 1.0 + 0.012 + chance.normal(0.0, 1e-4, 500)
    assert run(losses, baselines)[1] == []
    assert [finding.opened for finding in run(losses, baselines[1:2])[1]] == [True]


def test_the_alarm_closes_when_the_run_recovers_and_may_open_again() -> None:
    losses = np.ones(1500)
    losses[200:400] = losses[900:1200] = 1.02
    _, findings = run(losses, np.ones((1, 1500)))
    assert [finding.opened for finding in findings] == [True, False, True, False]
    # The second process gets half of the first one's share of alpha, so its threshold is twice as high.
    first, second = findings[0], findings[2]
    assert second.evidence["e_value"] >= 2 * 2 / ALPHA > first.evidence["e_value"] / 2


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_loss_that_is_not_finite_is_above(value: float) -> None:
    losses = np.ones(300)
    losses[200:] = value
    _, (finding,) = run(losses, np.ones((1, 300)))
    assert finding.onset_step == 200 and finding.value is None and "not finite" in finding.message


def test_ignores_points_without_a_baseline() -> None:
    baseline = np.full((2, 400), math.nan)
    baseline[0, ::2] = 1.0
    losses = np.where(np.arange(400) % 2, 100.0, 1.0)
    assert run(losses, baseline)[1] == []


def test_ignores_duplicate_and_rewound_steps() -> None:
    state, _ = above_baseline({}, np.arange(100), np.ones(100), np.ones((1, 100)), PARAMETERS)
    again, findings = above_baseline(state, np.arange(100), np.full(100, 9.0), np.ones((1, 100)), PARAMETERS)
    assert again == state and findings == []


@given(
    st.lists(st.sampled_from([0.9, 1.0, 1.01, 1.5, math.nan, math.inf, 1e308]), max_size=200),
    st.lists(st.integers(0, 200), max_size=5),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.0, -2.0, 1e-200, 1e200, math.nan]),
)
def test_the_result_does_not_depend_on_the_batches(
    values: list[float], cuts: list[int], seeds: int, level: float
) -> None:
    losses = np.array(values, dtype=np.float64)
    baselines = level * (1.0 + 0.001 * np.arange(seeds)[:, None] * np.ones(len(losses)))
    inside = tuple(cut for cut in cuts if cut <= len(losses))
    assert run(losses, baselines, cuts=inside) == run(losses, baselines)


def test_stores_an_unbounded_spread_between_seeds() -> None:
    """Two seeds cancel out in the mean, so that the square of the relative spread is not finite."""
    baseline = np.outer([1e100, -1e100, 1e-99], np.ones(10))
    state, findings = run(np.full(10, 2.0), baseline)
    json.dumps(state, allow_nan=False)
    assert findings == []
