"""Intervals of scores, checked against exact values or by their coverage in simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8scope_dashboard.analysis.scores.intervals import (
    Interval,
    clopper_pearson,
    error_of_mean,
    has_spread,
    mean_interval,
    prediction,
    smallest_detectable,
    student_t,
    unseen,
    wilson,
)

ALPHA = 0.05
TRIALS = 1500
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
    assert error_of_mean(items).value == pytest.approx(expected)
    assert error_of_mean(items, [str(i) for i in range(100)]).value == pytest.approx(expected)


def test_copies_of_items_in_a_cluster_do_not_narrow_the_interval() -> None:
    items = np.random.default_rng(1).normal(size=50)
    copied, names = np.repeat(items, 8), np.repeat([str(i) for i in range(50)], 8).tolist()
    assert error_of_mean(copied, names).value == pytest.approx(error_of_mean(items).value)
    assert error_of_mean(copied).value < error_of_mean(items).value / 2


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
        error_of_mean(np.array(items) if items else np.zeros(1))


def test_one_cluster_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="at least two"):
        error_of_mean(np.arange(5.0), ["a"] * 5)
    with pytest.raises(ValueError, match="one name per item"):
        error_of_mean(np.arange(5.0), ["a"] * 4)


def test_one_seed_has_no_interval() -> None:
    for interval in (student_t, prediction):
        with pytest.raises(ValueError, match="two"):
            interval(np.ones(1), ALPHA)


def test_an_interval_contains_its_bounds() -> None:
    assert (
        Interval(0.0, 1.0).holds(0.0) and Interval(0.0, 1.0).holds(1.0) and not Interval(0.0, 1.0).holds(1.1)
    )


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30])
def test_the_mean_of_few_normal_items_covers(n: int) -> None:
    """With the normal quantile, 5 items cover .88 and 2 items .70."""
    draws = np.random.default_rng(n).normal(1.0, 2.0, size=(TRIALS, n))
    covered = np.mean([mean_interval(row, ALPHA).holds(1.0) for row in draws])
    assert abs(covered - 0.95) < SLACK


@pytest.mark.parametrize("groups", [3, 5, 10])
def test_few_clusters_cover(groups: int) -> None:
    chance = np.random.default_rng(groups)
    names = np.repeat([str(i) for i in range(groups)], 4).tolist()
    covered = 0
    for _ in range(1500):
        items = np.repeat(chance.normal(size=groups), 4) + chance.normal(size=4 * groups)
        covered += mean_interval(items, ALPHA, names).holds(0.0)
    assert abs(covered / 1500 - 0.95) < 5 * math.sqrt(0.95 * 0.05 / 1500)


def test_unequal_clusters_have_fewer_degrees_of_freedom() -> None:
    """A cluster with nine tenths of the items leaves hardly one degree of freedom."""
    names = ["big"] * 90 + [str(i) for i in range(10)]
    error = error_of_mean(np.random.default_rng(0).normal(size=100), names)
    assert error.units == 11 and error.freedom < 1.5
    even = error_of_mean(np.arange(30.0), [str(i % 10) for i in range(30)])
    assert even.freedom == pytest.approx(9.0)


def test_the_clustered_error_is_cr2() -> None:
    """Second witness: the general formula with matrices, (I - H_gg)^(-1/2) applied to each cluster."""
    chance = np.random.default_rng(1)
    names = np.repeat([0, 1, 2, 3], [2, 5, 3, 7])
    items = chance.normal(size=17)
    variance = 0.0
    for cluster in range(4):
        members = np.flatnonzero(names == cluster)
        hat = np.full((len(members), len(members)), 1.0 / 17)
        values, vectors = np.linalg.eigh(np.eye(len(members)) - hat)
        adjusted = vectors @ np.diag(values**-0.5) @ vectors.T @ (items[members] - items.mean())
        variance += adjusted.sum() ** 2
    assert error_of_mean(items, [str(name) for name in names]).value == pytest.approx(
        math.sqrt(variance) / 17
    )


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12), st.sampled_from([0.01, 0.05, 0.3]))
def test_intervals_stay_within_the_range_of_the_metric(items: list[float], alpha: float) -> None:
    values, limits = np.array(items), Interval(0.0, 1.0)
    names = [str(i // 2) for i in range(len(items))]
    bands = [
        mean_interval(values, alpha, limits=limits),
        student_t(values, alpha, limits),
        prediction(values, alpha, limits=limits),
        *([mean_interval(values, alpha, names, limits)] if len(set(names)) > 1 else []),
    ]
    for band in bands:
        assert 0.0 <= band.low <= band.high <= 1.0


def test_equal_items_do_not_have_an_interval_of_zero_width() -> None:
    interval = mean_interval(np.ones(20), ALPHA, limits=Interval(0.0, 1.0))
    assert interval.high == 1.0
    assert interval.low == pytest.approx(clopper_pearson(20, 20, ALPHA).low)


def test_the_degrees_of_freedom_are_those_of_the_covariance_matrix() -> None:
    """Second witness: the whole matrix of the scaled residual sums, with independent and with equal items."""
    sizes = np.array([2.0, 5.0, 3.0, 7.0, 1.0])
    shares = sizes / sizes.sum()
    expected = []
    for working in (sizes, sizes**2):
        scaled = (np.eye(5) - np.outer(shares, np.ones(5))) / np.sqrt(1.0 - shares)[:, None]
        matrix = scaled @ np.diag(working) @ scaled.T
        expected.append(np.trace(matrix) ** 2 / np.sum(matrix**2))
    names = np.repeat(["a", "b", "c", "d", "e"], sizes.astype(int)).tolist()
    error = error_of_mean(np.random.default_rng(0).normal(size=18), names)
    assert error.freedom == pytest.approx(min(expected))


def test_the_rule_of_three() -> None:
    assert unseen(1000, 0.05) == pytest.approx(3 / 1000, rel=5e-3)


def test_equal_scores_have_no_spread_even_with_rounding() -> None:
    """The standard deviation of three times 0.1 is 1.7e-17, not 0."""
    scores = np.array([0.1, 0.1, 0.1])
    assert not has_spread(scores)
    assert has_spread(scores + [0.0, 0.0, 1e-6])
