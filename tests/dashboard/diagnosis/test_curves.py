"""Trouble in losses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fp8scope_dashboard.diagnosis.curves import troubles

Floats = NDArray[np.float64]


def falling(points: int = 300, noise: float = 0.03, seed: int = 0) -> Floats:
    noisy = np.random.default_rng(seed).normal(0.0, noise, points)
    return 2.0 + 3.0 / np.sqrt(1.0 + np.arange(points) / 8.0) + noisy


@pytest.mark.parametrize("points", [38, 100, 300, 2000])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_falling_loss_is_no_trouble(points: int, noise: float) -> None:
    for seed in range(20):
        assert troubles(np.arange(points), falling(points, noise, seed)) == []


def test_autocorrelated_noise_is_no_trouble() -> None:
    chance = np.random.default_rng(3)
    for _ in range(20):
        noise = np.zeros(400)
        for t in range(1, 400):
            noise[t] = 0.7 * noise[t - 1] + chance.normal(0.0, 0.03)
        assert troubles(np.arange(400), falling(400, 0.0) + noise) == []


@pytest.mark.parametrize("level", [falling(300, 0.0), 0.02 + 3.0 * np.exp(-np.arange(300) / 40.0)])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_skewed_noise_of_small_batches_is_no_trouble(level: Floats, spread: float) -> None:
    alarms = 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0.0, spread, 300)
        alarms += bool(troubles(np.arange(300), level * np.exp(noise)))
    assert alarms <= 2
    noise = np.random.default_rng(0).normal(0.0, 0.3, 300)
    diverging = level * np.exp(noise) + np.maximum(0.0, np.arange(300) - 200) * 0.3
    *_, last = troubles(np.arange(300), diverging)
    assert last.lasts and 195 <= last.onset <= 225


def test_a_first_loss_that_is_low_by_chance_is_no_level() -> None:
    losses = 0.9 + np.random.default_rng(1).normal(0.0, 0.05, 300)
    losses[0] = 0.77
    assert troubles(np.arange(300), losses) == []


def test_a_spike_is_a_jump_that_ends() -> None:
    losses = falling()
    losses[200:203] += 4.0
    (trouble,) = troubles(np.arange(300), losses)
    assert trouble.kind == "jump" and trouble.onset == 200 and trouble.until is not None
    assert trouble.until - 202 <= 10 and trouble.size > 1.0


def test_a_divergence_is_a_rise_that_lasts() -> None:
    losses = falling() + np.maximum(0.0, np.arange(300) - 180) * 0.02
    (trouble,) = troubles(np.arange(300), losses)
    assert trouble.kind == "rise" and trouble.lasts and 180 <= trouble.onset <= 210


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_rise_is_no_jump_and_begins_at_its_bend(seed: int) -> None:
    """A rise to 8 % over two thirds of a run was a jump at the step that left the noise."""
    steps = np.arange(4_000)
    losses = (2.0 + 2.0 * np.exp(-steps / 150.0)) * (
        1.0 + np.random.default_rng(seed).normal(0.0, 0.01, 4_000)
    )
    losses *= 1.0 + 0.08 * np.clip((steps - 1_300) / 2_700, 0.0, 1.0)
    (trouble,) = troubles(steps, losses)
    assert trouble.kind == "rise" and trouble.lasts
    assert abs(trouble.onset - 1_300) < 200 and trouble.certain_from > 2_500


def test_a_loss_that_is_not_finite() -> None:
    losses = falling()
    losses[250:] = np.nan
    (trouble,) = troubles(np.arange(1, 301), losses)
    assert trouble.kind == "not_finite" and trouble.onset == 251 and trouble.lasts
    losses[260:] = 2.2
    (trouble,) = troubles(np.arange(1, 301), losses)
    assert trouble.until == 260


def test_short_and_empty_curves_have_none() -> None:
    assert troubles(np.zeros(0, np.int64), np.zeros(0)) == []
    assert troubles(np.arange(3), np.array([3.0, 2.0, 9.0])) == []
