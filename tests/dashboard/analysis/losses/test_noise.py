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
    share_of_mean,
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


def window(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([start]), np.array([stop])


def test_slow_wander_counts_as_noise() -> None:
    still = np.random.default_rng(6).normal(size=1000)
    wander = 3.0 * np.sin(np.arange(1000) / 100.0)
    drifts = [noise_of(Sums(values, 12), *window(900, 1000)).drift[0] for values in (still, still + wander)]
    assert drifts[0] < 0.1 and drifts[1] > 1.0


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("points", [1, 5, 60])
def test_the_variance_of_a_mean_of_correlated_points(rho: float, points: int) -> None:
    lags = np.abs(np.subtract.outer(np.arange(points), np.arange(points)))
    expected = float((rho**lags).mean())
    assert share_of_mean(np.array([rho]), np.array([float(points)]))[0] == pytest.approx(expected)


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_the_noise_of_a_mean_is_that_of_simulated_means(rho: float) -> None:
    """On the safe side, because of the cautious correlation, and by less than a factor of 2.5."""
    many = [autoregressive(2000, rho, seed) for seed in range(60)]
    actual = np.sqrt(np.mean([values[1900:].mean() ** 2 for values in many]))
    errors = [
        np.sqrt(noise_of(Sums(values, newey_west_lags(2000) + 1), *window(1900, 2000)).variance[0])
        for values in many
    ]
    assert actual < np.median(errors) * 1.2 and np.median(errors) < 2.5 * actual


def test_noise_that_falls_is_that_of_the_window() -> None:
    """Validation losses of seeds differ by a per cent early, and by a hundredth of it at the end."""
    falling = np.random.default_rng(7).normal(size=28) * 0.01 * np.exp(-np.arange(28) / 5.0)
    steady = np.random.default_rng(7).normal(size=28) * 0.01
    errors = [np.sqrt(noise_of(Sums(values, 4), *window(23, 28)).variance[0]) for values in (falling, steady)]
    assert errors[0] < 0.001 < errors[1]


def test_noise_that_grows_is_that_of_the_window() -> None:
    values = np.random.default_rng(8).normal(size=400) * np.where(np.arange(400) < 340, 0.001, 0.05)
    assert noise_of(Sums(values, 8), *window(340, 400)).variance[0] > 0.004**2


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
