"""A harm that begins in the course of a run: found soon, by the noise before it, as by the alert."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter

from fp8scope_dashboard.alerts.detectors import above_baseline
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.harm import BLOCK, RECOVER
from fp8scope_dashboard.analysis.losses.result import LossComparison
from fp8scope_dashboard.analysis.losses.verdict import compare_losses

POINTS = 1000
STEPS = np.arange(POINTS)


def arms(seed: int, runs: int, *, noise: float = 0.002) -> np.ndarray:
    """Losses float64[runs, POINTS] of one configuration: shared batches, offsets of seeds, own noise."""
    chance = np.random.default_rng(seed)
    level = (2.0 + 2.0 * np.exp(-STEPS / 150.0)) * (1.0 + 0.03 * chance.normal(size=POINTS))
    own = 0.0004 * chance.normal(size=(runs, 1)) + noise * chance.normal(size=(runs, POINTS))
    return np.asarray(level * (1.0 + own))


def compare(losses: np.ndarray, runs: int, until: int = POINTS) -> LossComparison:
    curves = [LossCurve(steps=STEPS[:until], losses=each[:until], planned=POINTS - 1) for each in losses]
    return compare_losses(curves[:runs], curves[runs:], margin=0.0025, alpha=0.05)


@pytest.mark.parametrize(("runs", "baselines"), [(1, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("onset", [300, 500, 700])
def test_a_step_of_one_per_cent_is_worse_within_a_tenth_of_the_run(
    runs: int, baselines: int, onset: int
) -> None:
    """It was 'cannot tell' until 90 to 95 % of the run."""
    losses = arms(1, runs + baselines)
    assert compare(losses, runs, onset).verdict != "worse"
    losses[:runs, onset:] *= 1.01
    result = compare(losses, runs, onset + POINTS // 10)
    assert result.verdict == "worse" and result.interval is not None and result.tolerance is not None
    assert result.interval[0] > result.tolerance
    if result.onset is not None:
        assert abs(result.onset.since_step - onset) <= 40 and result.onset.decided_step < onset + 100


@pytest.mark.parametrize("onset", [280, 600])
def test_a_slow_divergence_is_worse_before_it_is_two_per_cent_above(onset: int) -> None:
    """It grew to 8 %, and counted as its own noise until the end."""
    losses = arms(2, 2)
    rise = 0.08 * np.clip((STEPS - onset) / (POINTS - onset), 0.0, 1.0)
    losses[0] *= 1.0 + rise
    said = next(n for n in range(onset + 40, POINTS, 40) if compare(losses, 1, n).verdict == "worse")
    assert rise[said] < 0.02
    assert compare(losses, 1).verdict == "worse"


def test_verdict_and_alert_have_one_onset() -> None:
    losses = arms(3, 2)
    losses[0, 600:] *= 1.02
    parameters = {"margin": 0.0025, "alpha": 0.05, "block": BLOCK, "recover": RECOVER}
    for until in range(600, 640, 8):
        _, findings = above_baseline({}, STEPS[:until], losses[0, :until], losses[1:, :until], parameters)
        result = compare(losses, 1, until)
        assert (result.verdict == "worse") == bool(findings)
    assert result.onset is not None and findings
    assert result.onset.since_step == findings[0].onset_step
    assert result.onset.decided_step == findings[0].step


def test_the_sentence_shows_the_interval_that_decided() -> None:
    losses = arms(4, 2)
    losses[0, 500:] *= 1.015
    result = compare(losses, 1, 560)
    assert result.onset is not None and result.interval is not None
    assert f"Since about step {result.onset.since_step}" in result.explanation
    low, high = (f"{100.0 * bound:.2f} %" for bound in result.interval)
    assert f"{low} to {high}, is wholly above" in result.explanation
    assert result.as_dict()["onset"]["since_step"] == result.onset.since_step


def test_a_harm_that_ends_is_worse_no_longer() -> None:
    losses = arms(5, 2)
    losses[0, 300:400] *= 1.03
    assert compare(losses, 1, 400).verdict == "worse" and compare(losses, 1).verdict != "worse"


@pytest.mark.parametrize("runs", [1, 3])
def test_equal_runs_are_not_worse_at_any_look(runs: int) -> None:
    for seed in range(3):
        losses = arms(10 + seed, 2 * runs)
        assert all(compare(losses, runs, n).verdict != "worse" for n in range(250, POINTS + 1, 250))


def after_a_warm_up(seed: int, rho: float, rise: float) -> np.ndarray:
    """Two runs that are bitwise equal until FP8 begins at step 400."""
    chance = np.random.default_rng(seed)
    losses = np.repeat(arms(seed, 1), 2, axis=0)
    noise = lfilter([np.sqrt(1.0 - rho**2)], [1.0, -rho], chance.normal(size=POINTS))
    losses[0, 400:] *= 1.0 + rise + 0.005 * noise[400:]
    return losses


def test_arms_that_were_equal_bit_for_bit_have_an_interval_with_a_width() -> None:
    """It was '5.94 % to 5.94 %'."""
    losses = after_a_warm_up(6, 0.0, 0.06)
    for until in (700, 1000):
        result = compare(losses, 1, until)
        assert result.verdict == "worse" and result.interval is not None and result.delta is not None
        low, high = result.interval
        assert high - low > 2 * 0.0005 and low < 0.06 < high


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_noise_that_begins_with_fp8_is_no_harm(rho: float) -> None:
    for seed in range(3):
        losses = after_a_warm_up(20 + seed, rho, 0.0)
        assert all(compare(losses, 1, n).verdict != "worse" for n in range(500, POINTS + 1, 100))


def test_long_runs_are_averaged_and_their_onset_is_that_of_their_points() -> None:
    steps = np.arange(10_000)
    chance = np.random.default_rng(7)
    baseline = 2.0 * (1.0 + 0.002 * chance.normal(size=10_000))
    losses = 2.0 * (1.0 + 0.002 * chance.normal(size=10_000)) * np.where(steps >= 6000, 1.02, 1.0)
    result = compare_losses(
        [LossCurve(steps=steps, losses=losses)],
        [LossCurve(steps=steps, losses=baseline)],
        margin=0.0025,
        alpha=0.05,
    )
    part = compare_losses(
        [LossCurve(steps=steps[:6500], losses=losses[:6500])],
        [LossCurve(steps=steps, losses=baseline)],
        margin=0.0025,
        alpha=0.05,
    )
    assert result.verdict == part.verdict == "worse"
    assert part.onset is not None and abs(part.onset.since_step - 6000) <= 20


def test_a_short_run_that_lost_a_nat_is_worse_at_once() -> None:
    """38 points: it was 'cannot tell' without a word."""
    chance, steps = np.random.default_rng(8), np.arange(38)
    ours, theirs = 1.4 * (1.0 + 0.03 * chance.normal(size=(2, 38)))
    ours[20:] += 1.0
    result = compare_losses(
        [LossCurve(steps=steps[:28], losses=ours[:28])],
        [LossCurve(steps=steps, losses=theirs)],
        margin=0.0025,
        alpha=0.05,
    )
    assert result.verdict == "worse" and result.onset is not None and result.onset.since_step == 20
    assert result.interval is not None and result.tolerance is not None
    assert result.interval[0] > result.tolerance


def test_the_needed_steps_of_a_difference_that_moves_are_not_known() -> None:
    """A slope counted as noise that averages out: 'about 3,000 more steps'."""
    losses = arms(9, 2, noise=0.003)
    losses[0] *= 1.0 + 0.006 * STEPS / POINTS
    result = compare(losses, 1, 900)
    assert result.verdict == "cannot_tell" and result.needs is not None and result.needs["steps"] is None
    assert result.moving is not None and 0.0 < result.moving["change"] < 0.006
    since = f"since step {result.moving['since']:,.0f}, so the number of steps"
    assert "the difference moves. It has risen by 0." in result.explanation and since in result.explanation
    still = compare(arms(9, 2, noise=0.003), 1, 900)
    assert still.moving is None and "moves" not in still.explanation
