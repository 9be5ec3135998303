"""The sign e-process: its false-alarm rate by simulation, its delay and its state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.alerts.detectors import Finding, State, above_baseline
from fp8scope_dashboard.alerts.detectors.baseline import BETS, wealth

ALPHA = 0.05
PARAMETERS = {"margin": 0.0025, "alpha": ALPHA, "block": 5.0, "recover": 10.0}
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
    baseline = np.full((1, 300), 2.0)
    losses = np.where(np.arange(300) < 100, 2.0, 2.02)
    _, (finding,) = run(losses, baseline)
    assert finding.opened and finding.onset_step == 100 and finding.step < 190
    assert finding.value == pytest.approx(0.01) and finding.threshold == 0.0025
    assert finding.evidence["e_value"] >= 2 / ALPHA
    assert finding.message.startswith("Loss is above its baseline since about step 100: 1 % over 2 at step")


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


@pytest.mark.parametrize("noise", [median_zero, skewed, shifting])
def test_false_alarms_over_the_whole_run_are_bounded(
    noise: Callable[[np.random.Generator], np.ndarray],
) -> None:
    """At the edge of the hypothesis (median equal to the margin), where alarms are most likely."""
    chance = np.random.default_rng(7)
    baseline = np.ones((1, BLOCKS))
    alarms = sum(
        bool(run(1.0 + PARAMETERS["margin"] + 1e-3 * noise(chance), baseline, block=1.0)[1])
        for _ in range(RUNS)
    )
    # The bound is alpha; five standard errors of a share of RUNS above it would be chance once in 10^6.
    assert alarms / RUNS <= ALPHA + 5 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_some_alarms_occur_at_the_edge_of_the_hypothesis(alpha: float) -> None:
    """The test is not vacuous: false alarms occur, but not more often than alpha."""
    chance = np.random.default_rng(8)
    signs = np.where(chance.random((400, BLOCKS)) < 0.5, 0.01, -0.01)
    alarms = sum(bool(run(1.0 + row, np.ones((1, BLOCKS)), block=1.0, alpha=alpha)[1]) for row in signs)
    assert 0 < alarms / 400 <= alpha + 5 * math.sqrt(alpha * (1 - alpha) / 400)


def test_the_wealth_is_a_supermartingale_that_starts_at_one() -> None:
    """The mean wealth over all sign sequences of ten fair coins is 1 at every step."""
    total = np.zeros(10)
    for path in range(2**10):
        signs = [0.01 if path >> i & 1 else -0.01 for i in range(10)]
        state: State = {}
        for i, sign in enumerate(signs):
            state, _ = above_baseline(
                state,
                np.array([i]),
                np.array([1.0 + sign]),
                np.ones((1, 1)),
                {**PARAMETERS, "block": 1.0, "alpha": 1e-6},
            )
            total[i] += wealth(state)
    assert total / 2**10 == pytest.approx(np.ones(10))


@pytest.mark.parametrize("change", [0, 50, 200, 1000])
def test_the_delay_grows_with_the_logarithm_of_the_change(change: int) -> None:
    losses = np.where(np.arange(change + 200) < change, 0.99, 1.01)
    _, (finding,) = run(losses, np.ones((1, len(losses))), block=1.0)
    assert finding.onset_step == change
    start = change + 1
    # The largest bet alone must turn its share, 1 / (k (k + 1)) / len(BETS), into 2 / alpha.
    needed = math.log(2 / ALPHA * len(BETS) * start * (start + 1)) / math.log(1 + max(BETS))
    assert finding.step - change <= math.ceil(needed)


def test_seeds_that_differ_widen_the_margin() -> None:
    chance = np.random.default_rng(3)
    offsets = np.array([[-0.01], [0.0], [0.01]])
    baselines = 1.0 + offsets + chance.normal(0.0, 1e-4, (3, 500))
    losses = 1.0 + 0.015 + chance.normal(0.0, 1e-4, 500)
    assert run(losses, baselines)[1] == []
    assert [finding.opened for finding in run(losses, baselines[:2])[1]] == [True]


def test_the_alarm_closes_when_the_run_recovers_and_may_open_again() -> None:
    losses = np.ones(1500)
    losses[100:300] = losses[900:1200] = 1.02
    _, findings = run(losses, np.ones((1, 1500)))
    assert [finding.opened for finding in findings] == [True, False, True, False]
    # The second process gets half of the first one's share of alpha, so its threshold is twice as high.
    first, second = findings[0], findings[2]
    assert second.evidence["e_value"] >= 2 * 2 / ALPHA > first.evidence["e_value"] / 2


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_loss_that_is_not_finite_is_above(value: float) -> None:
    losses = np.ones(200)
    losses[100:] = value
    _, (finding,) = run(losses, np.ones((1, 200)))
    assert finding.onset_step == 100 and finding.value is None and "not finite" in finding.message


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
