"""Intervals of scores, checked against exact values or by their coverage in simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8scope_dashboard.analysis.intervals import (
    Interval,
    clopper_pearson,
    mean_interval,
    prediction,
    smallest_detectable,
    standard_error,
    student_t,
    wilson,
)

ALPHA = 0.05
TRIALS = 4000
# Five standard errors of a binomial share of TRIALS draws at 0.95: chance fails such a test once in 10^6.
SLACK = 5 * math.sqrt(0.95 * 0.05 / TRIALS)


def test_it_works() -> None:
    interval = wilson(40, 50, ALPHA)
    expected = stats.binomtest(40, 50).proportion_ci(0.95, method="wilson")
    assert interval == pytest.approx((expected.low, expected.high))
    assert interval.holds(0.8) and not interval.holds(0.5)


@given(st.integers(1, 500), st.data(), st.sampled_from([0.01, 0.05, 0.3]))
def test_wilson_bounds_solve_the_score_equation(n: int, data: st.DataObject, alpha: float) -> None:
    """Each bound p is where |share - p| equals z sqrt(p (1 - p) / n), by which Wilson defined it."""
    successes = data.draw(st.integers(0, n))
    share, z = successes / n, stats.norm.isf(alpha / 2)
    interval = wilson(successes, n, alpha)
    assert 0.0 <= interval.low <= share <= interval.high <= 1.0
    for bound in interval:
        assert abs(share - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n), abs=1e-7)


@given(st.integers(1, 200), st.data(), st.sampled_from([0.01, 0.05, 0.3]))
def test_clopper_pearson_bounds_have_binomial_tails_of_half_alpha(
    n: int, data: st.DataObject, alpha: float
) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = clopper_pearson(successes, n, alpha)
    if successes:
        assert stats.binom.sf(successes - 1, n, low) == pytest.approx(alpha / 2, rel=1e-6)
    else:
        assert low == 0.0
    if successes < n:
        assert stats.binom.cdf(successes, n, high) == pytest.approx(alpha / 2, rel=1e-6)
    else:
        assert high == 1.0


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("n", [10, 50, 400])
def test_clopper_pearson_never_covers_less_than_promised(n: int, share: float) -> None:
    """The exact coverage, computed by summing the binomial distribution."""
    covered = sum(
        stats.binom.pmf(k, n, share) for k in range(n + 1) if clopper_pearson(k, n, ALPHA).holds(share)
    )
    assert covered >= 0.95 - 1e-12


def test_wilson_covers_on_average() -> None:
    """Exact coverage averaged over true shares of 0.005 to 0.995: near 0.95 already at n = 20."""
    n = 20
    bounds = [wilson(k, n, ALPHA) for k in range(n + 1)]
    shares = np.linspace(0.005, 0.995, 199)
    covered = [sum(stats.binom.pmf(k, n, p) for k in range(n + 1) if bounds[k].holds(p)) for p in shares]
    assert 0.945 < np.mean(covered) < 0.96


@pytest.mark.parametrize("bad", [(-1, 10), (11, 10), (0, 0)])
def test_refuses_impossible_counts(bad: tuple[int, int]) -> None:
    for interval in (wilson, clopper_pearson):
        with pytest.raises(ValueError, match="successes"):
            interval(*bad, ALPHA)


def test_the_standard_error_without_clusters_is_the_usual_one() -> None:
    items = np.random.default_rng(0).normal(size=100)
    expected = items.std(ddof=1) / 10
    assert standard_error(items) == pytest.approx(expected)
    assert standard_error(items, [str(i) for i in range(100)]) == pytest.approx(expected)


def test_copies_of_items_in_a_cluster_do_not_narrow_the_interval() -> None:
    items = np.random.default_rng(1).normal(size=50)
    copied, names = np.repeat(items, 8), np.repeat([str(i) for i in range(50)], 8).tolist()
    assert standard_error(copied, names) == pytest.approx(standard_error(items))
    assert standard_error(copied) < standard_error(items) / 2


def test_the_mean_interval_covers() -> None:
    chance = np.random.default_rng(2)
    draws = chance.exponential(1.0, size=(TRIALS, 400))
    covered = np.mean([mean_interval(row, ALPHA).holds(1.0) for row in draws])
    # A skewed distribution at n = 400 costs about half a per cent (Edgeworth); the rest is chance.
    assert abs(covered - 0.95) < SLACK + 0.005


def test_the_clustered_interval_covers_where_the_plain_one_does_not() -> None:
    chance = np.random.default_rng(3)
    names = np.repeat([str(i) for i in range(40)], 10).tolist()
    clustered = plain = 0
    for _ in range(TRIALS // 4):
        items = np.repeat(chance.normal(size=40), 10) + chance.normal(size=400)
        clustered += mean_interval(items, ALPHA, names).holds(0.0)
        plain += mean_interval(items, ALPHA).holds(0.0)
    trials = TRIALS // 4
    assert abs(clustered / trials - 0.95) < 2 * SLACK
    assert plain / trials < 0.75


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_student_t_covers_the_mean_and_prediction_a_further_seed(seeds: int) -> None:
    draws = np.random.default_rng(seeds).normal(0.6, 0.01, size=(TRIALS, seeds + 1))
    mean = np.mean([student_t(row[:-1], ALPHA).holds(0.6) for row in draws])
    further = np.mean([prediction(row[:-1], ALPHA).holds(row[-1]) for row in draws])
    assert abs(mean - 0.95) < SLACK and abs(further - 0.95) < SLACK


def test_predicts_the_mean_of_further_seeds() -> None:
    draws = np.random.default_rng(5).normal(size=(TRIALS, 7))
    held = np.mean([prediction(row[:4], ALPHA, further=3).holds(row[4:].mean()) for row in draws])
    assert abs(held - 0.95) < SLACK


def test_the_interval_of_the_mean_would_miss_a_further_seed_too_often() -> None:
    draws = np.random.default_rng(6).normal(size=(TRIALS, 4))
    held = np.mean([student_t(row[:3], ALPHA).holds(row[3]) for row in draws])
    assert held < 0.9


@pytest.mark.parametrize("seeds", [2, 3, 5, 30])
def test_the_smallest_detectable_difference_is_found_with_the_promised_power(seeds: int) -> None:
    draws = np.random.default_rng(seeds).normal(size=(TRIALS, seeds))
    error, means = draws.std(axis=1, ddof=1) / math.sqrt(seeds), draws.mean(axis=1)
    difference = smallest_detectable(1.0 / math.sqrt(seeds), ALPHA, seeds - 1)
    power = np.mean(np.abs(means + difference) / error > stats.t.isf(ALPHA / 2, seeds - 1))
    assert abs(power - 0.8) < 5 * math.sqrt(0.8 * 0.2 / TRIALS)


def test_the_smallest_detectable_difference_of_many_items_is_the_normal_one() -> None:
    assert smallest_detectable(2.0, ALPHA) == pytest.approx(2.0 * (1.959964 + 0.841621), rel=1e-6)
    assert smallest_detectable(2.0, ALPHA, 10_000) == pytest.approx(smallest_detectable(2.0, ALPHA), rel=1e-3)


@pytest.mark.parametrize("items", [[], [1.0]])
def test_one_item_has_no_standard_error(items: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        standard_error(np.array(items) if items else np.zeros(1))


def test_one_cluster_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="at least two"):
        standard_error(np.arange(5.0), ["a"] * 5)
    with pytest.raises(ValueError, match="one name per item"):
        standard_error(np.arange(5.0), ["a"] * 4)


def test_one_seed_has_no_interval() -> None:
    for interval in (student_t, prediction):
        with pytest.raises(ValueError, match="two"):
            interval(np.ones(1), ALPHA)


def test_an_interval_contains_its_bounds() -> None:
    assert (
        Interval(0.0, 1.0).holds(0.0) and Interval(0.0, 1.0).holds(1.0) and not Interval(0.0, 1.0).holds(1.1)
    )
