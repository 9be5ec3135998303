"""The noise of a pair: the long-run variance, the drift, and intervals of a mean."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal

from fp8scope_dashboard.analysis.losses.noise import (
    Sums,
    bootstrap_interval,
    hac_interval,
    long_run_variance,
    newey_west_lags,
    noise_of,
    prewhitened,
)


def autoregressive(n: int, rho: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=n + 200)
    return np.asarray(signal.lfilter([1.0], [1.0, -rho], noise)[200:])


def test_it_works() -> None:
    values = autoregressive(200_000, 0.5, 0)
    # The long-run variance of an AR(1) with unit noise is 1 / (1 - rho)^2 = 4; the plain variance 1.33.
    assert long_run_variance(values, lags=50) == pytest.approx(4.0, rel=0.1)
    assert long_run_variance(values, lags=0) == pytest.approx(4.0 / 3.0, rel=0.05)


def test_the_long_run_variance_equals_its_definition() -> None:
    values, lags = autoregressive(60, 0.3, 1), 4
    centred = values - values.mean()
    expected = sum(
        (1 - abs(i - j) / (lags + 1)) * centred[i] * centred[j]
        for i in range(60)
        for j in range(60)
        if abs(i - j) <= lags
    )
    assert long_run_variance(values, lags) == pytest.approx(expected / 60)


@pytest.mark.parametrize(("n", "lags"), [(0, 0), (1, 0), (2, 1), (100, 4), (10_000, 11)])
def test_the_number_of_lags(n: int, lags: int) -> None:
    assert newey_west_lags(n) == lags


def test_the_interval_covers_a_mean_of_correlated_values_better_than_the_plain_one() -> None:
    """HAC intervals cover slightly too little at this length; the plain interval is far worse."""
    hac = plain = 0
    for seed in range(1000):
        values = autoregressive(500, 0.6, seed)
        low, high = hac_interval(values, 0.05)
        hac += low <= 0.0 <= high
        low, high = hac_interval(values, 0.05, lags=0)
        plain += low <= 0.0 <= high
    assert hac / 1000 > 0.85 and plain / 1000 < 0.75


def test_prefix_sums_give_the_autocovariances_of_any_range() -> None:
    values = autoregressive(80, 0.5, 4) + 1e6
    sums = Sums(values, 3)
    for start, stop in ((0, 80), (17, 60), (40, 44)):
        part = values[start:stop] - values[start:stop].mean()
        at = np.array([start]), np.array([stop])
        assert sums.means(*at)[0] == pytest.approx(values[start:stop].mean())
        for lag in range(4):
            expected = (part[lag:] @ part[: len(part) - lag]) / len(part)
            assert sums.autocovariance(*at, lag)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_prewhitening_finds_the_long_run_variance(rho: float) -> None:
    values = autoregressive(40_000, rho, 5)
    sums = Sums(values, newey_west_lags(len(values)) + 1)
    variance, correlation = prewhitened(sums, np.array([0]), np.array([len(values)]))
    assert variance[0] == pytest.approx(1.0 / (1.0 - rho) ** 2, rel=0.1)
    assert correlation[0] == pytest.approx(rho, abs=0.02)


def test_slow_wander_counts_as_noise() -> None:
    still = np.random.default_rng(6).normal(size=1000)
    wander = 3.0 * np.sin(np.arange(1000) / 100.0)
    stop = np.array([1000])
    drifts = [noise_of(Sums(values, 12), stop).drift[0] for values in (still, still + wander)]
    assert drifts[0] < 0.1 and drifts[1] > 1.0


def test_the_stationary_bootstrap_agrees_with_the_hac_interval() -> None:
    """A second witness of the within-pair noise."""
    values = autoregressive(120, 0.4, 7)
    hac, bootstrap = hac_interval(values, 0.05), bootstrap_interval(values, 0.05)
    assert bootstrap == bootstrap_interval(values, 0.05)
    assert bootstrap[1] - bootstrap[0] == pytest.approx(hac[1] - hac[0], rel=0.3)
    assert sum(bootstrap) / 2 == pytest.approx(values.mean(), abs=0.05)
    assert bootstrap_interval(np.full(5000, 2.0), 0.05) == (2.0, 2.0)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_short_series_have_a_variance(n: int) -> None:
    assert long_run_variance(np.arange(float(n))) >= 0.0
