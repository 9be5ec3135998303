"""Differences of scores: paired, clustered, over other items, and few discordant items."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fp8scope_dashboard.analysis.scores.differences import (
    Discordant,
    ScoreDifference,
    mid_p,
    paired,
    sign_flip,
    unpaired,
)

Floats = NDArray[np.float64]
ALPHA = 0.05
TRIALS = 800
SLACK = 5 * math.sqrt(0.95 * 0.05 / TRIALS)


def pair(only_run: int, only_baseline: int, n: int) -> ScoreDifference:
    """Two single runs that differ in so many of n items."""
    rest = n - only_run - only_baseline
    run = np.repeat([1.0, 0.0, 1.0], [only_run, only_baseline, rest])
    baseline = np.repeat([0.0, 1.0, 1.0], [only_run, only_baseline, rest])
    return paired(run[None, :], baseline[None, :], proportion=True)


def test_it_works() -> None:
    result = pair(1, 2, 6)
    assert result.mean == pytest.approx(-1 / 6) and "McNemar" in result.method
    assert result.interval(ALPHA).low < -1 / 6 < result.interval(ALPHA).high
    # Two of three: P(X > 2) + P(X = 2) / 2 of three tosses.
    assert result.p_below() == pytest.approx(1 / 8 + 3 / 16)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_mid_p_value_is_between_the_exact_ones(only_run: int, only_baseline: int) -> None:
    n = only_run + only_baseline
    p = mid_p(Discordant(only_run, only_baseline, n), 1.0)
    if n == 0:
        assert p == 1.0
        return
    assert stats.binom.sf(only_run, n, 0.5) <= p <= stats.binom.sf(only_run - 1, n, 0.5)
    assert p + mid_p(Discordant(only_run, only_baseline, n), -1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("share", "alpha"), [(0.01, 0.05), (0.02, 0.05), (0.05, 0.05), (0.02, 0.005)])
def test_the_mid_p_test_keeps_its_size(share: float, alpha: float) -> None:
    """Exact: the number of discordant items of 500 is binomial, half of them fall on each side."""
    size = 0.0
    for n in range(80):
        wins = np.arange(n + 1)
        rejected = [mid_p(Discordant(int(k), n - int(k), 500), 1.0) <= alpha for k in wins]
        size += stats.binom.pmf(n, 500, share) * float(stats.binom.pmf(wins, n, 0.5)[rejected].sum())
    assert size <= alpha


@given(st.lists(st.sampled_from([-1.0, 1.0]), min_size=1, max_size=12))
def test_sign_flips_of_equal_sizes_are_the_mid_p_value(signs: list[float]) -> None:
    flips = np.array(signs)
    wins = int(np.sum(flips > 0))
    assert sign_flip(flips) == pytest.approx(mid_p(Discordant(wins, len(signs) - wins, 50), 1.0))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(30, 400))
def test_the_score_interval_solves_its_equation(b: int, c: int, n: int) -> None:
    """Tango (1998): at each bound the statistic with the restricted estimate is the normal quantile."""
    interval = pair(b, c, n).interval(ALPHA)
    assert interval.low < (b - c) / n < interval.high
    bounds = [interval.high] if b == 0 and c > 0 else [interval.low] if c == 0 and b > 0 else list(interval)
    if b == c == 0:
        return
    for delta in bounds:
        if delta == 0.0:
            # McNemar's mid-p value, which is more exact for few items, does not exclude 0.
            assert mid_p(Discordant(b, c, n), 1.0 if b > c else -1.0) > ALPHA / 2.0
            continue

        # The likelihood over the share q that only the baseline has right, with q + delta the other one.
        def loss(q: float, delta: float = delta) -> float:
            shares = np.clip([q + delta, q, 1.0 - 2.0 * q - delta], 1e-300, 1.0)
            return -float(np.dot([b, c, n - b - c], np.log(shares)))

        low, high = max(0.0, -delta), (1.0 - delta) / 2.0
        best = scipy.optimize.minimize_scalar(
            loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}
        ).x
        ratio = (b - c - n * delta) / math.sqrt(n * (2.0 * best + delta * (1.0 - delta)))
        assert abs(ratio) == pytest.approx(1.959964, rel=2e-3)


def test_pairs_without_a_difference_have_an_interval() -> None:
    """The old interval was 0 to 0."""
    interval = pair(0, 0, 100).interval(ALPHA)
    assert interval.low == -interval.high
    # The exact binomial bound: 1 - 0.025^(1/100).
    assert interval.high == pytest.approx(0.0362, abs=1e-4)
    means = np.random.default_rng(0).normal(2.0, 0.5, (1, 100))
    equal = paired(means, means).interval(ALPHA)
    assert equal.low < 0.0 < equal.high and paired(means, means).error > 0.0


def test_the_bound_is_exact_where_all_changes_go_one_way() -> None:
    """A harm of the bound would show so few changes with probability alpha / 2 at most."""
    for changes in range(4):
        low = pair(0, changes, 300).interval(2 * ALPHA).low
        assert stats.binom.cdf(changes, 300, -low) <= ALPHA + 1e-9


def test_pairing_removes_the_variance_between_items() -> None:
    chance = np.random.default_rng(0)
    hardness = chance.normal(0.0, 3.0, (1, 500))
    run = hardness + chance.normal(0.05, 0.1, 500)
    baseline = hardness + chance.normal(0.0, 0.1, 500)
    assert paired(run, baseline).error < unpaired(run, baseline).error / 10


@pytest.mark.parametrize("n", [3, 5, 50])
def test_paired_intervals_of_few_items_cover(n: int) -> None:
    chance = np.random.default_rng(n)
    covered = sum(
        paired(chance.normal(0.3, 1.0, (1, n)), np.zeros((1, n))).interval(ALPHA).holds(0.3)
        for _ in range(TRIALS)
    )
    assert abs(covered / TRIALS - 0.95) < SLACK


def test_paired_intervals_cover_with_three_clusters() -> None:
    """With the normal quantile these cover .81."""
    chance = np.random.default_rng(1)
    names = np.repeat([str(i) for i in range(3)], 4).tolist()
    covered = 0
    for _ in range(TRIALS):
        run = np.repeat(chance.normal(size=3), 4) + chance.normal(0.3, 1.0, 12)
        covered += paired(run[None, :], np.zeros((1, 12)), clusters=names).interval(ALPHA).holds(0.3)
    assert abs(covered / TRIALS - 0.95) < SLACK


def test_paired_proportions_cover() -> None:
    chance = np.random.default_rng(2)
    covered = 0
    for _ in range(TRIALS):
        chances = chance.beta(0.4, 0.3, 120)
        run = (chance.random(120) < 0.95 * chances).astype(float)[None, :]
        baseline = (chance.random(120) < chances).astype(float)[None, :]
        true = -0.05 * 0.4 / 0.7
        covered += paired(run, baseline, proportion=True).interval(ALPHA).holds(true)
    assert abs(covered / TRIALS - 0.95) < SLACK


def test_other_items_cover() -> None:
    chance = np.random.default_rng(2)
    held = 0
    for _ in range(TRIALS):
        run = (chance.random((1, 80)) < 0.7).astype(float)
        baseline = (chance.random((1, 60)) < 0.6).astype(float)
        held += unpaired(run, baseline, proportion=True).interval(ALPHA).holds(0.1)
    assert abs(held / TRIALS - 0.95) < SLACK + 0.01


def test_welch_is_that_of_scipy() -> None:
    chance = np.random.default_rng(5)
    run, baseline = chance.normal(0.0, 2.0, (1, 9)), chance.normal(1.0, 1.0, (1, 23))
    result = unpaired(run, baseline)
    expected = stats.ttest_ind(run[0], baseline[0], equal_var=False)
    assert result.interval(ALPHA) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert 2 * result.p_below() == pytest.approx(expected.pvalue)


def test_paired_t_is_that_of_scipy() -> None:
    chance = np.random.default_rng(4)
    run, baseline = chance.normal(0.0, 1.0, (1, 12)), chance.normal(0.4, 1.0, (1, 12))
    result = paired(run, baseline)
    expected = stats.ttest_rel(run[0], baseline[0])
    assert result.interval(ALPHA) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert result.p_below() == pytest.approx(stats.ttest_rel(run[0], baseline[0], alternative="less").pvalue)


def test_seed_variance_widens_the_interval_and_the_p_value() -> None:
    plain = pair(0, 10, 500)
    with_seeds = plain.with_further(0.01**2, 0.0)
    assert np.ptp(with_seeds.interval(ALPHA)) > 1.5 * np.ptp(plain.interval(ALPHA))
    assert with_seeds.p_below() > 10 * plain.p_below()
