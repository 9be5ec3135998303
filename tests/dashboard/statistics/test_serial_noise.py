"""The correlation of successive values, and the correction of its bias."""

from __future__ import annotations

import numpy as np
import pytest

from fp8scope_dashboard.statistics.serial_noise import lag_one, unbiased


def test_it_works() -> None:
    residuals = np.array([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    assert lag_one(residuals).tolist() == [-0.75, 0.25, 0.0]
    assert float(lag_one(residuals[0])) == -0.75
    assert unbiased(0.5, 10.0) == pytest.approx(0.75)
    assert unbiased(0.5, 10.0, terms=2) == pytest.approx(0.9)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("terms", [1, 2])
def test_is_right_on_average(correlation: float, terms: int) -> None:
    """Of an AR(1) about a mean, or about the means of its two halves."""
    chance = np.random.default_rng(7)
    series, steps = 4_000, 100
    values = np.zeros((series, steps))
    values[:, 0] = chance.normal(size=series) / np.sqrt(1.0 - correlation**2)
    for step in range(1, steps):
        values[:, step] = correlation * values[:, step - 1] + chance.normal(size=series)
    parts = np.split(values, terms, axis=1)
    residuals = np.concatenate([part - part.mean(axis=1, keepdims=True) for part in parts], axis=1)
    raw = lag_one(residuals)
    assert float(unbiased(raw, np.full(series, float(steps)), terms).mean()) == pytest.approx(
        correlation, abs=0.02
    )
    assert float(raw.mean()) < correlation - 0.005
