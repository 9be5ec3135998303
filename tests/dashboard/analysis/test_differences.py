"""Differences of scores: paired, clustered, unpaired, exact McNemar."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8scope_dashboard.analysis.differences import EXACT_BELOW, mcnemar, paired, unpaired

ALPHA = 0.05
TRIALS = 2000
SLACK = 5 * math.sqrt(0.95 * 0.05 / TRIALS)


def test_it_works() -> None:
    run, baseline = np.array([1, 1, 0, 1, 0, 1.0]), np.array([1, 0, 0, 1, 1, 0.0])
    result = paired(run, baseline, ALPHA, proportion=True)
    assert result.difference == pytest.approx(1 / 6)
    assert result.p_value == 1.0 and "McNemar" in result.method
    assert result.interval.low < 0 < result.interval.high


@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_is_the_two_sided_binomial_test(only_run: int, only_baseline: int) -> None:
    run = np.array([1.0] * only_run + [0.0] * only_baseline + [1.0, 0.0])
    baseline = np.array([0.0] * only_run + [1.0] * only_baseline + [1.0, 0.0])
    expected = stats.binomtest(only_run, only_run + only_baseline).pvalue if only_run + only_baseline else 1.0
    assert mcnemar(run, baseline) == pytest.approx(expected)


def test_mcnemar_is_used_for_few_discordant_pairs_only() -> None:
    baseline = np.zeros(1000)
    for discordant, exact in ((EXACT_BELOW - 1, True), (EXACT_BELOW, False)):
        run = baseline.copy()
        run[:discordant] = 1.0
        assert ("McNemar" in paired(run, baseline, ALPHA, proportion=True).method) is exact


def test_pairing_removes_the_variance_between_items() -> None:
    chance = np.random.default_rng(0)
    hardness = chance.normal(0.0, 3.0, 500)
    run, baseline = hardness + chance.normal(0.05, 0.1, 500), hardness + chance.normal(0.0, 0.1, 500)
    assert paired(run, baseline, ALPHA).error < unpaired(run, baseline, ALPHA).error / 10


def test_paired_intervals_cover_with_clusters_and_without() -> None:
    chance = np.random.default_rng(1)
    names = np.repeat([str(i) for i in range(50)], 4).tolist()
    plain = clustered = 0
    for _ in range(TRIALS):
        shared = chance.normal(size=200)
        plain += paired(shared + chance.normal(0.3, 1.0, 200), shared, ALPHA).interval.holds(0.3)
        common = np.repeat(chance.normal(size=50), 4)
        run = shared + common + chance.normal(0.3, 1.0, 200)
        clustered += paired(run, shared, ALPHA, clusters=names).interval.holds(0.3)
    assert abs(plain / TRIALS - 0.95) < SLACK and abs(clustered / TRIALS - 0.95) < SLACK


def test_newcombe_covers() -> None:
    """Newcombe's own tables: within about a per cent of nominal at these sizes."""
    chance = np.random.default_rng(2)
    held = 0
    for _ in range(TRIALS):
        run, baseline = (chance.random(80) < 0.7).astype(float), (chance.random(60) < 0.6).astype(float)
        held += unpaired(run, baseline, ALPHA, proportion=True).interval.holds(0.1)
    assert abs(held / TRIALS - 0.95) < SLACK + 0.01


def test_newcombe_matches_his_published_example() -> None:
    """56/70 against 48/80: method 10 gives 0.0524 to 0.3339 (Newcombe, 1998, table II, case a)."""
    run, baseline = np.repeat([1.0, 0.0], [56, 14]), np.repeat([1.0, 0.0], [48, 32])
    result = unpaired(run, baseline, ALPHA, proportion=True)
    assert result.interval == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_p_values_of_equal_runs_are_uniform() -> None:
    chance = np.random.default_rng(3)
    p_values = [
        unpaired(chance.normal(size=100), chance.normal(size=100), ALPHA).p_value for _ in range(TRIALS)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_the_difference_of_equal_items_is_zero() -> None:
    items = np.array([1.0, 0.0, 1.0])
    result = paired(items, items, ALPHA)
    assert (result.difference, result.p_value, result.error) == (0.0, 1.0, 0.0)


def test_a_constant_difference_is_certain() -> None:
    items = np.array([1.0, 2.0, 3.0])
    assert paired(items + 1.0, items, ALPHA).p_value == 0.0
