"""The time to the same loss: exact values, refusals, and how often the interval holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.signal import lfilter

from fp8scope_dashboard.analysis.quantities import LossSpread, MeasuredRun, MeasuredScalar, of
from fp8scope_dashboard.analysis.quantities.time_to_loss import time_to_loss
from fp8scope_dashboard.statistics.arrays import Floats

SPEED, MORE = 1.31, 0.018


def ar1(random: np.random.Generator, count: int, correlation: float, deviation: float) -> Floats:
    shocks = random.standard_normal(count + 100)
    series = lfilter([1.0], [1.0, -correlation], shocks)[100:]
    return np.asarray(series * deviation * np.sqrt(1.0 - correlation**2), np.float64)


def power_law(count: int, more: float = 0.0) -> Floats:
    return np.asarray(1.7 + 1.4 * (np.arange(1.0, count + 1.0) / 1_000.0 / (1.0 + more)) ** -0.3)


def run(losses: Floats, seconds: Floats | float, *, every: int = 1, first: int = 1) -> MeasuredRun:
    steps = np.arange(first, first + len(losses))
    times = np.broadcast_to(np.asarray(seconds, np.float64), steps.shape)
    scalars = {"step_seconds": MeasuredScalar(steps[every - 1 :: every], times[every - 1 :: every])}
    return MeasuredRun(MeasuredScalar(steps, losses), None, scalars)


def pair(**changes: Any) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    ours = run(power_law(1_000, MORE), 1.0 / SPEED, **changes)
    return [ours], [run(power_law(1_000), 1.0)]


def test_it_works() -> None:
    time = time_to_loss(*pair())
    # Up to what a power law differs from a parabola in the window.
    assert time.ratio == pytest.approx(SPEED / (1.0 + MORE), rel=1e-4) and time.target is not None
    # The slower arm defines the target, in the middle of its last third.
    assert time.ours == pytest.approx(821.0 / SPEED, rel=0.02)
    assert time.theirs == pytest.approx(821.0 / (1.0 + MORE), rel=0.02)
    entry = of(*pair())["time_to_loss"]
    assert (entry["ratio"], entry["loss"], entry["seconds"]) == (time.ratio, time.target, time.ours)


@pytest.mark.parametrize("every", [2, 7, 50])
def test_times_that_come_with_every_few_steps_stand_for_the_others(every: int) -> None:
    assert time_to_loss(*pair(every=every)).ratio == pytest.approx(SPEED / (1.0 + MORE), rel=1e-3)


def test_arms_of_other_lengths_meet_where_both_have_been() -> None:
    ours, theirs = [run(power_law(950), 0.5)], [run(power_law(3_000), 1.0)]
    assert time_to_loss(ours, theirs).ratio == pytest.approx(2.0, rel=1e-3)
    assert time_to_loss(theirs, ours).ratio == pytest.approx(0.5, rel=1e-3)


def test_a_slow_beginning_and_pauses_are_time_that_passed() -> None:
    seconds = np.ones(1_000)
    seconds[0], seconds[99::100] = 100.0, 11.0
    ours, theirs = [run(power_law(1_000), seconds)], [run(power_law(1_000), 1.0)]
    time = time_to_loss(ours, theirs)
    # At step 821: 99 s for the first step and 80 s for eight pauses more.
    assert time.ours is not None and time.theirs is not None
    assert time.ours - time.theirs == pytest.approx(179.0, abs=6.0)


@pytest.mark.parametrize(
    ("ours", "refusal"),
    [
        (MeasuredRun(MeasuredScalar(np.arange(1, 1_001), power_law(1_000))), "no_times"),
        (run(power_law(1_000), np.nan), "no_times"),
        (run(power_law(1_000)[:14], 1.0, every=1), "no_times"),
        (run(power_law(2_000)[1_000:], 1.0, first=1_001), "begins_late"),
        (run(np.where(np.arange(1_000) > 900, np.nan, power_law(1_000)), 1.0), "not_finite"),
        (run(2.0 + ar1(np.random.default_rng(0), 1_000, 0.0, 0.01), 1.0), "level"),
        (run(2.0 + np.arange(1_000) / 1_000.0, 1.0), "rising"),
    ],
)
def test_a_time_that_is_not_known_is_refused(ours: MeasuredRun, refusal: str) -> None:
    theirs = [run(power_law(1_000), 1.0)]
    for arms in (([ours], theirs), (theirs, [ours])):
        time = time_to_loss(*arms)
        assert (time.refusal, time.ratio, time.interval) == (refusal, None, None)
    entry = of([ours], theirs)["time_to_loss"]
    assert entry["refusal"] == refusal and entry["explanation"].endswith((".", "told."))


def test_an_arm_of_seeds_has_the_spread_between_them() -> None:
    random = np.random.default_rng(1)
    arms = [
        [run(power_law(1_000, more) + offset, 1.0 / speed) for offset in random.normal(0.0, 0.004, 3)]
        for speed, more in ((SPEED, MORE), (1.0, 0.0))
    ]
    time = time_to_loss(*arms)
    assert time.source == "runs" and time.has_seeds and time.interval is not None
    alone = time_to_loss(arms[0][:1], arms[1][:1], spread=LossSpread(0.004, 1e6))
    assert alone.has_seeds and alone.interval is not None and time.ratio is not None
    # The loss falls by 0.45 per factor e of the time, so the spread is 0.004 / 0.45 in each arm.
    half = np.log(alone.interval[1] / alone.interval[0]) / 2.0
    assert half == pytest.approx(1.96 * np.sqrt(2.0) * 0.004 / 0.45, rel=0.1)


@pytest.mark.parametrize(("runs", "spread"), [((1, 1), 0.0), ((2, 5), 0.006)])
def test_the_interval_holds_as_often_as_promised(runs: tuple[int, int], spread: float) -> None:
    """Losses and step times are correlated; nodes and seeds differ; arms have unequal numbers of seeds."""
    held, simulations = 0, 200
    for seed in range(simulations):
        random = np.random.default_rng([seed, 5])
        arms = []
        for count, speed, more in zip(runs, (SPEED, 1.0), (MORE, 0.0), strict=True):
            arm = []
            for _ in range(count):
                loss = power_law(300, more) + ar1(random, 300, 0.4, 0.01) + random.normal(0.0, spread)
                arm.append(run(loss, np.exp(ar1(random, 300, 0.6, 0.03)) / speed))
            arms.append(arm)
        interval = time_to_loss(*arms).interval
        held += interval is not None and interval[0] <= SPEED / (1.0 + MORE) <= interval[1]
    # 95 % less three standard errors; short series make intervals wider, not narrower.
    assert 0.90 <= held / simulations <= 0.995
