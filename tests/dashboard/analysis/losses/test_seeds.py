"""The spread between seeds: shrinkage, odd seeds, and the prior of a project."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, Prior, odd_seeds, pooled_prior, spread_of

TRIALS = 500


def relative(*losses: float) -> np.ndarray:
    values = np.array(losses)
    return np.asarray(values / values.mean())


def test_it_works() -> None:
    spread = spread_of([np.ones(1), np.array([0.999, 1.0, 1.001])], PUBLIC, seeds=3)
    assert (spread.source, spread.freedom, spread.conflict) == ("own", 5.0, False)
    assert spread.value == pytest.approx(math.sqrt((3 * 0.0011**2 + 2 * 0.001**2) / 5))
    assert spread.error(1, 3) == pytest.approx(spread.value * math.sqrt(4 / 3))
    assert spread.quantile(0.05) == pytest.approx(stats.t.isf(0.025, 5))


def test_one_seed_has_the_spread_of_the_prior() -> None:
    alone = spread_of([np.ones(1), np.ones(1)], PUBLIC, seeds=1)
    assert (alone.value, alone.freedom, alone.source) == (PUBLIC.spread, PUBLIC.freedom, "public")
    project = Prior(0.0005, 8.0, "project")
    assert spread_of([np.ones(1), np.ones(1)], project, seeds=1).source == "project"


def test_three_equal_seeds_do_not_have_a_spread_of_zero() -> None:
    assert spread_of([np.ones(3)], PUBLIC, seeds=3).value > 0.0008


def test_seeds_that_spread_far_more_than_the_prior_stand_alone() -> None:
    spread = spread_of([np.array([0.97, 1.0, 1.03])], PUBLIC, seeds=3)
    assert spread.conflict and spread.value == pytest.approx(0.03) and spread.freedom == 2.0


def test_only_few_healthy_groups_are_called_wide() -> None:
    """A spread of 0.18 % was said to be of seeds that may have diverged."""
    modest = spread_of([1.0 + 0.0018 * np.array([-1.0, 0.0, 1.0])], PUBLIC, seeds=3)
    assert modest.conflict and not modest.wide
    assert spread_of([np.array([0.97, 1.0, 1.03])], PUBLIC, seeds=3).wide


@pytest.mark.parametrize("seeds", [1, 2, 3, 5, 10])
def test_the_difference_of_a_further_seed_is_covered(seeds: int) -> None:
    """Over groups whose variances follow the prior, 95 % of further seeds are within the quantile."""
    chance = np.random.default_rng(seeds)
    held = 0
    for _ in range(TRIALS):
        deviation = PUBLIC.spread * math.sqrt(PUBLIC.freedom / chance.chisquare(PUBLIC.freedom))
        further, *group = 1.0 + deviation * chance.normal(size=seeds + 1)
        spread = spread_of([np.array(group)], PUBLIC, seeds=seeds)
        held += abs(further - np.mean(group)) <= spread.quantile(0.05) * spread.error(1, seeds)
    assert 0.95 - 5 * math.sqrt(0.05 * 0.95 / TRIALS) < held / TRIALS < 0.985


def test_a_seed_that_diverged_but_stayed_finite_is_odd() -> None:
    """It made the tolerance 38.6 %."""
    assert odd_seeds(relative(3.0, 3.003, 3.4), PUBLIC) == [2]
    assert odd_seeds(relative(3.4, 3.0, 3.002, 2.999, 3.5), PUBLIC) == [0, 4]
    assert odd_seeds(relative(3.0, 3.003, 2.996, 3.001), PUBLIC) == []
    # Nothing shows which of two is odd.
    assert odd_seeds(relative(3.0, 3.4), PUBLIC) == []


@pytest.mark.parametrize("deviation", [0.0003, 0.001, 0.02])
def test_seeds_of_one_group_are_rarely_odd(deviation: float) -> None:
    chance = np.random.default_rng(1)
    odd = [odd_seeds(1.0 + deviation * chance.normal(size=4), PUBLIC) for _ in range(TRIALS)]
    assert np.mean([bool(each) for each in odd]) < 0.04


def test_the_prior_of_a_project_is_pooled_over_its_groups() -> None:
    assert pooled_prior([]) is PUBLIC and pooled_prior([np.array([3.0])]) is PUBLIC
    chance = np.random.default_rng(2)
    groups = [3.0 * (1.0 + 0.0004 * chance.normal(size=4)) for _ in range(6)]
    prior = pooled_prior(groups)
    assert prior.source == "project" and 0.0003 < prior.spread < 0.0007 and prior.freedom == 8.0
    # One diverged run does not spoil it.
    groups[0][1] = 4.0
    assert pooled_prior(groups).spread == pytest.approx(prior.spread, rel=0.2)
    assert pooled_prior([np.array([3.0, math.nan, 3.001])]).freedom == 4.0
