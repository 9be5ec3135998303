"""The confidence sequence: windows on a fixed grid, and its error over many looks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import signal

from fp8scope_dashboard.analysis.losses.sequence import (
    mixture_quantile,
    sequence,
    windows,
)
from fp8scope_dashboard.statistics.student import quantiles_at

TRIALS = 150


def looks_at(n: int) -> np.ndarray:
    return np.unique(np.maximum(20, np.arange(1, 21) * n // 20))


def test_it_works() -> None:
    difference = 0.01 + np.random.default_rng(0).normal(0.0, 0.001, 2000)
    looks = sequence(np.arange(2000.0), difference, looks_at(2000), alpha=0.05, fraction=0.1)
    assert looks.level[-1] == pytest.approx(0.01, abs=looks.half[-1])
    # The band narrows.
    assert (looks.half[1:] < looks.half[0]).all() and looks.half[-1] < 0.4 * looks.half[1]


def test_windows_start_on_a_grid_that_does_not_depend_on_the_look() -> None:
    x = np.arange(0.0, 5000.0, 5.0)
    stop = np.arange(60, len(x) + 1)
    start, number = windows(x, stop, 0.1)
    assert (np.diff(number) >= 0).all() and (np.diff(start) >= 0).all()
    for each in np.unique(number):
        assert len(np.unique(start[number == each])) == 1
    share = (stop - start) / stop
    assert (share >= 0.1).all() and (share[stop > 100] < 0.22).all() and (stop - start >= 5).all()


def test_the_mixture_bound_holds_at_all_sample_sizes_at_once() -> None:
    """Robbins: the mean of independent normal values leaves the bound at any size with probability alpha."""
    sizes = np.arange(1.0, 2001.0)
    bound = mixture_quantile(sizes, np.full(2000, 100.0), np.full(2000, 0.05))
    chance = np.random.default_rng(1)
    sums = chance.normal(size=(1500, 2000)).cumsum(axis=1)
    assert (np.abs(sums) / np.sqrt(sizes) > bound).any(axis=1).mean() < 0.05
    assert sizes[bound.argmin()] == pytest.approx(100.0, rel=0.3)


def test_short_series_use_students_t() -> None:
    assert quantiles_at(np.array([1.96]), np.array([1e9]))[0] == pytest.approx(1.96, abs=1e-3)
    assert quantiles_at(np.array([1.96]), np.array([4.0]))[0] == pytest.approx(2.776, abs=5e-3)
    assert math.isfinite(quantiles_at(np.array([40.0]), np.array([1.0]))[0])


@pytest.mark.parametrize(("points", "rho"), [(38, 0.0), (38, 0.9), (300, 0.3), (300, 0.9), (1500, 0.9)])
def test_twenty_looks_rarely_exclude_the_truth(points: int, rho: float) -> None:
    """Noise of 3 % in each run: 64 to 96 % of such pairs were 'over'."""
    chance = np.random.default_rng(2)
    wrong = 0
    for _ in range(TRIALS):
        noise = signal.lfilter([1.0], [1.0, -rho], chance.normal(size=points + 200))[200:]
        difference = 0.03 * math.sqrt(2.0 * (1.0 - rho**2)) * noise
        looks = sequence(np.arange(float(points)), difference, looks_at(points), alpha=0.05, fraction=0.1)
        wrong += bool((np.abs(looks.level) > looks.half + 0.0025).any())
    assert wrong / TRIALS <= 0.05


@pytest.mark.parametrize(("points", "noise"), [(28, 0.003), (300, 0.01)])
@pytest.mark.parametrize(("ended", "power"), [(True, 0.95), (False, 0.75)])
def test_a_pair_of_short_curves_finds_one_per_cent(
    points: int, noise: float, ended: bool, power: float
) -> None:
    """Noise that falls during the run, as that of validation losses does, with some correlation.

    28 points leave a window of five, so four degrees of freedom at most. At the end of the run they suffice.
    Before it, the price of looking at any time makes Student's t so wide that one in five pairs must wait.
    """
    chance = np.random.default_rng(3)
    found, trials = 0, 60
    for _ in range(trials):
        correlated = signal.lfilter([1.0], [1.0, -0.5], chance.normal(size=points + 100))[100:]
        difference = 0.01 + noise * np.exp(-4.0 * np.arange(points) / points) * correlated
        looks = sequence(
            np.arange(float(points)), difference, looks_at(points), alpha=0.05, fraction=0.1, ended=ended
        )
        found += bool(looks.level[-1] - looks.half[-1] > 0.0025)
    assert found / trials >= power
