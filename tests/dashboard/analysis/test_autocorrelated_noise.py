"""Autocorrelated noise: the long-run variance and the moving band."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal

from fp8scope_dashboard.analysis.autocorrelated_noise import (
    hac_interval,
    long_run_variance,
    moving_band,
    newey_west_lags,
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


def test_the_band_is_the_interval_of_each_window() -> None:
    values = autoregressive(301, 0.4, 3)
    mean, low, high = moving_band(values, 101, 0.05)
    assert mean[150] == pytest.approx(values[100:201].mean())
    expected = hac_interval(values[100:201], 0.05)
    # The residuals of the band are relative to the moving mean rather than the mean of the window.
    assert high[150] - low[150] == pytest.approx(expected[1] - expected[0], rel=0.25)


def test_the_band_of_a_constant_difference_has_no_width() -> None:
    mean, low, high = moving_band(np.full(50, 0.01), 11, 0.05)
    assert mean == pytest.approx(0.01) and low == pytest.approx(mean) and high == pytest.approx(mean)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_short_curves_have_finite_bands(n: int) -> None:
    for array in moving_band(np.arange(float(n)), 5, 0.05):
        assert len(array) == n and np.isfinite(array).all()
    assert long_run_variance(np.arange(float(n))) >= 0.0
