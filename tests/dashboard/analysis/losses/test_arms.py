"""Equivalence tests over seeds: their error rates by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fp8scope_dashboard.analysis.losses.arms import EquivalenceTest, claim_quantile, two_one_sided_tests
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, Spread, spread_of

MARGIN, ALPHA, TRIALS = 0.0025, 0.05, 1500


def welch_test(run: np.ndarray, baseline: np.ndarray, margin: float = MARGIN) -> EquivalenceTest:
    scale = abs(float(baseline.mean()))
    return two_one_sided_tests(run, baseline, margin, ALPHA, None, scale=scale)


def slack(share: float) -> float:
    """Five standard errors of a share of TRIALS: chance fails such a test once in 10^6."""
    return 5 * math.sqrt(share * (1 - share) / TRIALS)


def verdicts(delta: float, sd: float, seeds: tuple[int, int], seed: int = 0) -> dict[str, float]:
    chance = np.random.default_rng(seed)
    counts = {"equivalent": 0, "worse": 0, "better": 0, "cannot_tell": 0}
    for _ in range(TRIALS):
        run = 3.0 * (1.0 + delta) * (1.0 + sd * chance.normal(size=seeds[0]))
        baseline = 3.0 * (1.0 + sd * chance.normal(size=seeds[1]))
        counts[welch_test(run, baseline).verdict] += 1
    return {name: count / TRIALS for name, count in counts.items()}


def test_it_works() -> None:
    run, baseline = np.array([3.001, 3.0, 2.999]), np.array([3.0, 3.001, 2.998])
    result = welch_test(run, baseline)
    assert result.verdict == "equivalent" and result.p_value < ALPHA
    assert result.interval[0] < result.delta < result.interval[1]


@pytest.mark.parametrize("seeds", [(2, 3), (4, 4), (10, 3)])
@pytest.mark.parametrize("sign", [1, -1])
def test_arms_at_the_margin_are_rarely_called_equivalent_or_worse(seeds: tuple[int, int], sign: int) -> None:
    """At the margin both claims are wrong; the rate of each must not exceed alpha."""
    shares = verdicts(sign * MARGIN, 0.0006, seeds)
    assert shares["equivalent"] <= ALPHA + slack(ALPHA)
    assert shares["worse"] + shares["better"] <= ALPHA + slack(ALPHA)


def test_equal_arms_with_little_spread_are_equivalent_and_others_different() -> None:
    assert verdicts(0.0, 0.0004, (4, 4))["equivalent"] > 0.98
    assert verdicts(0.01, 0.0004, (4, 4))["worse"] > 0.98
    assert verdicts(-0.01, 0.0004, (4, 4))["better"] > 0.98
    assert verdicts(0.0, 0.01, (3, 3))["cannot_tell"] > 0.9


def test_the_interval_covers() -> None:
    chance = np.random.default_rng(1)
    held = 0
    for _ in range(TRIALS):
        run = 3.0 * 1.01 + 0.02 * chance.normal(size=5)
        baseline = 3.0 + 0.005 * chance.normal(size=5)
        low, high = welch_test(run, baseline).interval
        held += low <= 0.01 <= high
    # Welch's degrees of freedom are an approximation: good to about half a per cent here.
    assert abs(held / TRIALS - (1 - 2 * ALPHA)) < slack(0.1) + 0.005


def test_verdict_and_p_value_agree() -> None:
    chance = np.random.default_rng(2)
    for _ in range(200):
        result = welch_test(3.0 + 0.004 * chance.normal(size=3), 3.0 + 0.004 * chance.normal(size=3))
        assert (result.verdict == "equivalent") == (result.p_value <= ALPHA)


def test_equals_scipys_welch_test() -> None:
    """With the baseline's mean as a known denominator, the difference is scipy's two-sample problem."""
    run, baseline = np.array([3.01, 3.02, 3.00]), np.array([3.0, 3.001, 3.002, 2.999])
    result = welch_test(run, baseline)
    welch = stats.ttest_ind(run, baseline, equal_var=False)
    interval = welch.confidence_interval(1 - 2 * ALPHA)
    # The delta method's factor on the baseline's error is the ratio of the means, 1.0033 here.
    assert result.interval == pytest.approx(
        (interval.low / baseline.mean(), interval.high / baseline.mean()), rel=0.01
    )
    assert result.freedom == pytest.approx(welch.df, rel=0.01)


def test_the_claim_of_a_difference_keeps_its_level_at_any_margin() -> None:
    freedom = 6.0
    one_sided, two_sided = (stats.t.isf(level, freedom) for level in (ALPHA, ALPHA / 2))
    assert claim_quantile(ALPHA, freedom, 50.0) == pytest.approx(one_sided)
    assert claim_quantile(ALPHA, freedom, 0.0) == pytest.approx(two_sided)
    middle = claim_quantile(ALPHA, freedom, 0.5)
    assert stats.t.sf(middle, freedom) + stats.t.sf(middle + 1.0, freedom) == pytest.approx(ALPHA)
    # Without a margin to speak of, 'worse' and 'better' share alpha.
    assert sum(verdicts(0.0, 0.05, (3, 3))[name] for name in ("worse", "better")) <= ALPHA + slack(ALPHA)


@pytest.mark.parametrize(("delta", "verdict"), [(0.0, "equivalent"), (0.01, "worse"), (-0.01, "better")])
def test_seeds_that_agree_by_chance_get_the_spread_of_other_runs(delta: float, verdict: str) -> None:
    """Identical losses in an arm gave an interval of zero width."""
    run, baseline = np.full(2, 3.0 * (1 + delta)), np.full(2, 3.0)
    result = two_one_sided_tests(
        run, baseline, MARGIN, ALPHA, Spread(value=0.0005, freedom=5.0, source="public", seeds=2), scale=3.0
    )
    assert result.verdict == verdict
    assert result.interval[1] - result.interval[0] == pytest.approx(2 * stats.t.isf(ALPHA, 5.0) * 0.0005)


def test_one_seed_is_not_enough() -> None:
    with pytest.raises(ValueError, match="two runs in each arm"):
        welch_test(np.ones(1), np.ones(5))


@pytest.mark.parametrize(("deviation", "noise"), [(0.0, 0.02), (0.0005, 0.005), (0.003, 0.003)])
def test_noisy_seeds_that_agree_by_chance_are_not_precise(deviation: float, noise: float) -> None:
    """The prior is of the spread between seeds alone: without the noise it halved the error of such arms."""
    chance = np.random.default_rng(3)
    wrong = {True: 0, False: 0}
    for _ in range(TRIALS):
        run, baseline = (1.0 + math.hypot(deviation, noise) * chance.normal(size=3) for _ in range(2))
        for known in wrong:
            spread = spread_of([run, baseline], PUBLIC, seeds=3, noise=noise if known else 0.0)
            result = two_one_sided_tests(run, baseline, MARGIN, ALPHA, spread, scale=1.0)
            wrong[known] += result.verdict in ("worse", "better")
    assert wrong[True] / TRIALS <= ALPHA + slack(ALPHA)
    assert wrong[True] <= wrong[False]


def test_arms_that_spread_differently_are_tested_by_welch() -> None:
    """FP8 may spread more than BF16: the pooled spread would be too small for it."""
    chance = np.random.default_rng(4)
    baseline = 3.0 + 0.0005 * chance.normal(size=8)
    run = 3.0 + 0.05 * chance.normal(size=3)
    spread = spread_of([run / 3.0, baseline / 3.0], PUBLIC, seeds=8)
    pooled = two_one_sided_tests(run, baseline, MARGIN, ALPHA, spread, scale=3.0)
    assert pooled == two_one_sided_tests(run, baseline, MARGIN, ALPHA, None, scale=3.0)
    assert pooled.freedom == pytest.approx(2.0, abs=0.1)


def test_a_moderated_test_finds_half_a_per_cent_with_three_seeds() -> None:
    """Welch's test alone has 2 to 4 degrees of freedom; the prior adds its own."""
    chance = np.random.default_rng(5)
    found = {"moderated": 0, "welch": 0}
    for _ in range(TRIALS):
        run, baseline = 1.005 + 0.0008 * chance.normal(size=3), 1.0 + 0.0008 * chance.normal(size=3)
        spread = spread_of([run, baseline], PUBLIC, seeds=3)
        for name, given in (("moderated", spread), ("welch", None)):
            result = two_one_sided_tests(run, baseline, MARGIN, ALPHA, given, scale=1.0)
            found[name] += result.verdict == "worse"
    assert found["moderated"] / TRIALS > 0.88 and found["moderated"] > found["welch"]
