"""Equivalence tests: their error rates by simulation, and the tolerance of one run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fp8scope_dashboard.analysis.equivalence import (
    judge_single,
    relative_spread,
    tolerance,
    two_one_sided_tests,
)

MARGIN, ALPHA, TRIALS = 0.0025, 0.05, 1500


def slack(share: float) -> float:
    """Five standard errors of a share of TRIALS: chance fails such a test once in 10^6."""
    return 5 * math.sqrt(share * (1 - share) / TRIALS)


def verdicts(delta: float, sd: float, seeds: tuple[int, int], seed: int = 0) -> dict[str, float]:
    chance = np.random.default_rng(seed)
    counts = {"equivalent": 0, "different": 0, "inconclusive": 0}
    for _ in range(TRIALS):
        run = 3.0 * (1.0 + delta) * (1.0 + sd * chance.normal(size=seeds[0]))
        baseline = 3.0 * (1.0 + sd * chance.normal(size=seeds[1]))
        counts[two_one_sided_tests(run, baseline, MARGIN, ALPHA).verdict] += 1
    return {name: count / TRIALS for name, count in counts.items()}


def test_it_works() -> None:
    run, baseline = np.array([3.001, 3.0, 2.999]), np.array([3.0, 3.001, 2.998])
    result = two_one_sided_tests(run, baseline, MARGIN, ALPHA)
    assert result.verdict == "equivalent" and result.p_value < ALPHA
    assert result.interval[0] < result.delta < result.interval[1]


@pytest.mark.parametrize("seeds", [(2, 3), (4, 4), (10, 3)])
@pytest.mark.parametrize("sign", [1, -1])
def test_arms_at_the_margin_are_rarely_called_equivalent_or_different(
    seeds: tuple[int, int], sign: int
) -> None:
    """At the margin both claims are wrong; the rate of each must not exceed alpha."""
    shares = verdicts(sign * MARGIN, 0.0006, seeds)
    assert shares["equivalent"] <= ALPHA + slack(ALPHA)
    assert shares["different"] <= ALPHA + slack(ALPHA)


def test_equal_arms_with_little_spread_are_equivalent_and_others_different() -> None:
    assert verdicts(0.0, 0.0004, (4, 4))["equivalent"] > 0.98
    assert verdicts(0.01, 0.0004, (4, 4))["different"] > 0.98
    assert verdicts(0.0, 0.01, (3, 3))["inconclusive"] > 0.9


def test_the_interval_covers() -> None:
    chance = np.random.default_rng(1)
    held = 0
    for _ in range(TRIALS):
        run = 3.0 * 1.01 + 0.02 * chance.normal(size=5)
        baseline = 3.0 + 0.005 * chance.normal(size=5)
        low, high = two_one_sided_tests(run, baseline, MARGIN, ALPHA).interval
        held += low <= 0.01 <= high
    # Welch's degrees of freedom are an approximation: good to about half a per cent here.
    assert abs(held / TRIALS - (1 - 2 * ALPHA)) < slack(0.1) + 0.005


def test_verdict_and_p_value_agree() -> None:
    chance = np.random.default_rng(2)
    for _ in range(200):
        result = two_one_sided_tests(
            3.0 + 0.004 * chance.normal(size=3), 3.0 + 0.004 * chance.normal(size=3), MARGIN, ALPHA
        )
        assert (result.verdict == "equivalent") == (result.p_value <= ALPHA)


def test_equals_scipys_welch_test() -> None:
    """With the baseline's mean as a known denominator, the difference is scipy's two-sample problem."""
    run, baseline = np.array([3.01, 3.02, 3.00]), np.array([3.0, 3.001, 3.002, 2.999])
    result = two_one_sided_tests(run, baseline, MARGIN, ALPHA)
    welch = stats.ttest_ind(run, baseline, equal_var=False)
    interval = welch.confidence_interval(1 - 2 * ALPHA)
    # The delta method's factor on the baseline's error is the ratio of the means, 1.0033 here.
    assert result.interval == pytest.approx(
        (interval.low / baseline.mean(), interval.high / baseline.mean()), rel=0.01
    )
    assert result.degrees_of_freedom == pytest.approx(welch.df, rel=0.01)


@pytest.mark.parametrize(("delta", "verdict"), [(0.0, "equivalent"), (0.01, "different")])
def test_arms_without_any_spread(delta: float, verdict: str) -> None:
    assert (
        two_one_sided_tests(np.full(2, 3.0 * (1 + delta)), np.full(2, 3.0), MARGIN, ALPHA).verdict == verdict
    )


def test_one_seed_is_not_enough() -> None:
    with pytest.raises(ValueError, match="two runs in each arm"):
        two_one_sided_tests(np.ones(1), np.ones(5), MARGIN, ALPHA)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_further_seed_is_over_as_often_as_documented(seeds: int) -> None:
    chance = np.random.default_rng(seeds)
    draws = 3.0 + 0.3 * chance.normal(size=(TRIALS, seeds + 1))
    over = np.mean([judge_single(row[0], row[1:], 1e-9)[0] == "over" for row in draws])
    documented = 2 * stats.t.sf(3.0, seeds - 1)
    assert abs(over - documented) < slack(documented)


def test_the_tolerance_needs_three_seeds_and_is_never_below_the_margin() -> None:
    losses = np.array([2.9, 3.0, 3.1])
    assert tolerance(losses[:2], MARGIN) == MARGIN
    assert tolerance(losses, MARGIN) == pytest.approx(3 * 0.1 / 3.0 * math.sqrt(4 / 3))
    assert tolerance(np.full(3, 3.0), MARGIN) == MARGIN
    assert relative_spread(np.ones(1)) == 0.0


@pytest.mark.parametrize(
    ("loss", "verdict"), [(3.0, "within"), (3.007, "within"), (3.008, "over"), (2.99, "over")]
)
def test_one_run_is_compared_with_the_margin(loss: float, verdict: str) -> None:
    judged, delta, allowed = judge_single(loss, np.array([3.0]), MARGIN)
    assert judged == verdict and allowed == MARGIN
    assert delta == pytest.approx(loss / 3.0 - 1.0)
