"""Costs and savings: exact values, second witnesses, refusals, and sentences."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.signal import lfilter

from fp8scope_dashboard.analysis.quantities import METHOD_VERSION, LossSpread, MeasuredRun, MeasuredScalar, of
from fp8scope_dashboard.analysis.quantities.arms import combined, difference
from fp8scope_dashboard.analysis.quantities.headline import net_speed
from fp8scope_dashboard.analysis.quantities.ratios import energy, gradient_norm, memory, throughput
from fp8scope_dashboard.analysis.quantities.serial import Estimate, fit, group_medians, mean
from fp8scope_dashboard.analysis.quantities.tokens_cost import fieller, tokens_cost
from fp8scope_dashboard.analysis.quantities.window import last_window
from fp8scope_dashboard.text.quantities import faster, headline, less_memory, share, times

Floats = NDArray[np.float64]
STEPS: Floats = np.arange(1.0, 1_001.0)
TOKENS: Floats = np.asarray(65_536.0 * STEPS, np.float64)


def power_law(tokens: NDArray[np.floating[Any]]) -> Floats:
    return np.asarray(1.7 + 1.4 * (tokens / TOKENS[-1]) ** -0.3, np.float64)


def run(loss: Floats, *, tokens: Floats | None = TOKENS, **scalars: Floats) -> MeasuredRun:
    steps = np.arange(1, len(loss) + 1)
    lines = {name: MeasuredScalar(np.arange(1, len(values) + 1), values) for name, values in scalars.items()}
    return MeasuredRun(MeasuredScalar(steps, loss), None if tokens is None else tokens[: len(loss)], lines)


def noisy(seed: int, size: int = 1_000, deviation: float = 0.002) -> Floats:
    return np.random.default_rng(seed).normal(0.0, deviation, size)


def test_it_works() -> None:
    ours = run(power_law(TOKENS / 1.018) + noisy(1), tokens_per_second=1.31e6 * np.exp(noisy(2)))
    theirs = run(power_law(TOKENS) + noisy(3), tokens_per_second=1e6 * np.exp(noisy(4)))
    result = of([ours], [theirs])
    low, high = result["tokens_cost"]["interval"]
    assert low < 0.018 < high and high - low < 0.005
    assert result["throughput"]["ratio"] == pytest.approx(1.31, rel=1e-3)
    assert result["net"]["ratio"] == pytest.approx(1.31 / 1.018, rel=3e-3)
    assert result["headline"].startswith("FP8 is 1.31\u202f× (1.31 to 1.31) faster and needs 1.")
    assert result["headline"].endswith("to the same loss.")
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("more", [-0.2, -0.01, 0.0, 0.004, 0.05, 0.3])
def test_the_cost_of_a_run_without_noise_is_exact(more: float) -> None:
    # Up to what a power law differs from a parabola in the window.
    cost = tokens_cost([run(power_law(TOKENS / (1.0 + more)))], [run(power_law(TOKENS))])
    assert cost.more == pytest.approx(more, abs=5e-3 * abs(more) + 1e-12) and cost.axis == "tokens"


def test_steps_count_where_tokens_are_missing() -> None:
    cost = tokens_cost([run(power_law(TOKENS / 1.05), tokens=None)], [run(power_law(TOKENS))])
    assert cost.axis == "steps" and cost.more == pytest.approx(0.05, rel=1e-2)


@pytest.mark.parametrize(
    ("ours", "theirs", "refusal"),
    [
        (np.full(1_000, 2.0) + noisy(1), np.full(1_000, 2.0) + noisy(2), "level"),
        (power_law(TOKENS), 2.0 + STEPS / 1_000 + noisy(3), "rising"),
        (power_law(TOKENS)[:8], power_law(TOKENS), "few_points"),
        (np.where(STEPS > 900, np.nan, power_law(TOKENS)), power_law(TOKENS), "not_finite"),
        (np.where(STEPS > 500, np.inf, power_law(TOKENS)), power_law(TOKENS), "not_finite"),
        (power_law(TOKENS) + 1.0 + noisy(4), power_law(TOKENS) + noisy(5), "beyond"),
        (np.zeros(1_000), np.zeros(1_000), "level"),
    ],
)
def test_a_cost_that_cannot_be_known_is_refused(ours: Floats, theirs: Floats, refusal: str) -> None:
    cost = tokens_cost([run(ours)], [run(theirs)])
    assert (cost.refusal, cost.more, cost.interval) == (refusal, None, None)
    result = of([run(ours)], [run(theirs)])
    assert result["tokens_cost"]["explanation"] and result["headline"] == ""


def test_the_spread_of_seeds_widens_the_interval() -> None:
    pair = [run(power_law(TOKENS / 1.01) + noisy(1))], [run(power_law(TOKENS) + noisy(2))]
    alone, with_seeds = tokens_cost(*pair), tokens_cost(*pair, spread=LossSpread(0.01, 100.0))
    assert alone.interval is not None and with_seeds.interval is not None
    assert not alone.has_seeds and with_seeds.has_seeds
    # The slope of the power law in log tokens is .45 in the middle of the window.
    half = (with_seeds.interval[1] - with_seeds.interval[0]) / 2.0
    assert half == pytest.approx(1.98 * 0.01 * math.sqrt(2.0) / 0.45, rel=0.1)


def test_runs_that_log_other_steps_are_binned() -> None:
    every_third = MeasuredRun(
        MeasuredScalar(STEPS[::3].astype(np.int64), power_law(TOKENS / 1.05)[::3]), TOKENS[::3]
    )
    cost = tokens_cost([every_third], [run(power_law(TOKENS))])
    assert cost.more == pytest.approx(0.05, abs=0.004)


def test_pauses_and_the_beginning_do_not_count() -> None:
    rate = np.full(1_000, 2e6)
    rate[::10] /= 5.0
    rate[:15] /= 50.0
    ratio = throughput([run(STEPS, tokens_per_second=rate)], [run(STEPS, tokens_per_second=STEPS * 0 + 1e6)])
    assert ratio.value == pytest.approx(2.0, rel=1e-12) and ratio.interval is None


def test_step_times_stand_in_for_tokens_per_second() -> None:
    fast, slow = np.full(100, 0.5), np.full(100, 1.0)
    mine, other = (
        run(power_law(TOKENS)[:100], step_seconds=fast),
        run(power_law(TOKENS)[:100], step_seconds=slow),
    )
    assert throughput([mine], [other]).name == "tokens_per_second"
    assert throughput([mine], [other]).value == pytest.approx(2.0)
    twice = run(power_law(TOKENS)[:100], tokens=2.0 * TOKENS, step_seconds=fast)
    assert throughput([twice], [other]).value == pytest.approx(4.0)
    without = run(power_law(TOKENS)[:100], tokens=None, step_seconds=fast)
    assert throughput([without], [other]).name == "steps_per_second"
    assert throughput([run(power_law(TOKENS))], [other]).value is None


def test_memory_is_the_peak_of_the_run() -> None:
    rising = np.minimum(STEPS, 500) * 2.0**20
    ratio = memory([run(STEPS, memory_peak=rising)], [run(STEPS, memory_peak=2.0 * rising)])
    assert ratio.value == pytest.approx(0.5) and ratio.interval is None
    assert memory([run(STEPS)], [run(STEPS, memory_peak=rising)]).value is None


def test_energy_is_power_over_tokens_per_second() -> None:
    rate = np.full(1_000, 1e6)
    rate[:20] = 1e3
    sampled = np.where(np.arange(1_000) % 7 == 0, 500.0, np.nan)
    mine = run(STEPS, tokens_per_second=1.25 * rate, gpu_power_watts=1.1 * sampled)
    ratio = energy([mine], [run(STEPS, tokens_per_second=rate, gpu_power_watts=sampled)])
    assert ratio.value == pytest.approx(1.1 / 1.25) and ratio.interval is None and ratio.points == 140
    noise = np.exp(noisy(1, deviation=0.05))
    noisier = run(STEPS, tokens_per_second=1.25 * rate, gpu_power_watts=1.1 * sampled * noise)
    uncertain = energy([noisier], [run(STEPS, tokens_per_second=rate, gpu_power_watts=sampled)]).interval
    assert uncertain is not None and uncertain[0] < 1.1 / 1.25 < uncertain[1] < 1.02 * 1.1 / 1.25
    assert energy([run(STEPS, tokens_per_second=rate)], [mine]).value is None
    assert energy([run(STEPS, gpu_power_watts=sampled)], [mine]).value is None
    few = run(STEPS, tokens_per_second=rate, gpu_power_watts=np.where(STEPS > 900, sampled, np.nan))
    assert energy([few], [mine]).value is None
    entry = of([run(STEPS)], [mine])["energy"]
    assert entry["ratio"] is None and "gpu_power_watts" in entry["explanation"]


def test_gradient_norms_are_paired() -> None:
    batches = np.exp(np.random.default_rng(0).normal(0.0, 0.5, 1_000))
    ratio = gradient_norm(
        [run(STEPS, grad_norm=1.02 * batches * np.exp(noisy(1)))], [run(STEPS, grad_norm=batches)]
    )
    assert ratio.value == pytest.approx(1.02, rel=1e-3) and ratio.interval is not None
    assert ratio.interval[0] < 1.02 < ratio.interval[1] and ratio.interval[1] - ratio.interval[0] < 1e-3


def test_a_run_that_died_early_does_not_take_part() -> None:
    result = of([run(power_law(TOKENS / 1.05))], [run(power_law(TOKENS)), run(power_law(TOKENS)[:5])])
    assert result["runs"] == [1, 1] and result["tokens_cost"]["delta"] == pytest.approx(0.05, rel=1e-2)


@pytest.mark.parametrize(
    "arms", [([], []), ([run(power_law(TOKENS))], []), ([run(np.zeros(0))], [run(STEPS)])]
)
def test_nothing_to_compare(arms: tuple[list[MeasuredRun], list[MeasuredRun]]) -> None:
    assert of(*arms) == {"method_version": METHOD_VERSION, "headline": ""}


def test_a_fit_is_least_squares_with_one_factor_for_all_errors() -> None:
    design = np.stack([np.ones(40), np.linspace(-1.0, 1.0, 40)], axis=1)
    values = 2.0 + 3.0 * design[:, 1] + noisy(3, 40, 0.1)
    witness = stats.linregress(design[:, 1], values)
    result = fit(design, values)
    assert result.coefficients == pytest.approx([witness.intercept, witness.slope])
    ratios = np.sqrt(np.diag(result.covariance)) / [witness.intercept_stderr, witness.stderr]
    assert ratios[0] == pytest.approx(ratios[1]) and result.dof < 38


def test_the_variance_of_uncorrelated_noise_is_right_on_average() -> None:
    """On average neither estimates below zero nor the skewness of tau widen the interval."""
    estimates = [mean(values) for values in np.random.default_rng(1).standard_normal((3_000, 48))]
    variances = np.array([each.variance for each in estimates])
    assert variances.mean() == pytest.approx(1.0 / 48, rel=0.04)
    # The scatter of a variance with d degrees of freedom is 2 / d of its square.
    scatter = 2.0 * variances.mean() ** 2 / variances.var()
    assert np.median([each.dof for each in estimates]) == pytest.approx(scatter, rel=0.25)


@pytest.mark.parametrize(("points", "correlation"), [(10, 0.0), (16, 0.0), (24, 0.3), (48, 0.5)])
def test_short_series_are_covered_as_promised(points: int, correlation: float) -> None:
    shocks = np.random.default_rng(2).standard_normal((3_000, points + 50))
    held = 0
    for series in lfilter([1.0], [1.0, -correlation], shocks, axis=1)[:, 50:]:
        low, high = mean(series).interval(0.95)
        held += low <= 0.0 <= high
    assert 0.93 <= held / 3_000 <= 0.97


def test_correlated_noise_widens_the_interval() -> None:
    shocks = np.random.default_rng(0).standard_normal(400)
    walk = np.convolve(shocks, 0.8 ** np.arange(60))[:400]
    naive = math.sqrt(walk.var(ddof=1) / 400)
    assert math.sqrt(mean(walk).variance) == pytest.approx(3.0 * naive, rel=0.35)


@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=60), st.floats(0.1, 10.0), st.floats(-10.0, 10.0))
@settings(max_examples=60)
def test_intervals_shift_and_scale_with_the_values(values: list[float], scale: float, shift: float) -> None:
    array = np.array(values)
    low, high = mean(array).interval(0.95)
    assert low <= array.mean() + 1e-6 and array.mean() - 1e-6 <= high
    moved = mean(scale * array + shift).interval(0.95)
    # Without any variance the residuals are rounding errors, whose correlation is arbitrary.
    if np.ptp(array) > 1e-3:
        np.testing.assert_allclose(moved, (scale * low + shift, scale * high + shift), rtol=1e-4, atol=1e-4)


def test_groups_cover_all_values_once() -> None:
    assert group_medians(np.array([1.0, 9.0, 1.0, 2.0, 2.0, 50.0])).tolist() == [1.0, 2.0]
    for count in (3, 100, 144, 200):
        some = noisy(count, count)
        expected = [np.median(part) for part in np.array_split(some, min(48, count // 3))]
        np.testing.assert_array_equal(group_medians(some), expected)


def test_arms_of_several_runs_are_compared_by_welch() -> None:
    ours, theirs = [1.0, 1.2, 1.4], [0.9, 1.0, 0.8, 1.1]
    result = difference(*([Estimate(v, 0.0, 1.0) for v in arm] for arm in (ours, theirs)))
    witness = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(result.estimate.interval(0.95), (witness.low, witness.high))
    assert result.source == "runs"


def test_one_run_against_several_uses_their_spread() -> None:
    result = difference([Estimate(1.0, 1e-9, 9.0)], [Estimate(v, 0.0, 1.0) for v in (1.0, 2.0, 3.0)])
    assert result.estimate.variance == pytest.approx(1.0 * (1.0 + 1.0 / 3.0)) and result.estimate.dof == 2.0
    two = difference([Estimate(1.0, 0.1, 9.0)], [Estimate(v, 0.2, 9.0) for v in (1.0, 2.0)])
    assert two.source == "within" and two.estimate.variance == pytest.approx(0.1 + 0.4 / 4)


def test_satterthwaite() -> None:
    assert combined(0.0, [(1.0, 4.0), (1.0, 4.0)]).dof == pytest.approx(8.0)
    assert combined(0.0, [(1.0, 4.0), (0.0, 1.0)]).dof == pytest.approx(4.0)


def test_fieller_is_the_set_of_ratios_that_are_not_rejected() -> None:
    over, under = Estimate(0.02, 0.005**2, 1e9), Estimate(0.4, 0.05**2, 1e9)
    bounds = fieller(over, under, 0.95)
    assert bounds is not None
    for theta in bounds:
        z = (over.value - theta * under.value) / math.sqrt(over.variance + theta**2 * under.variance)
        assert abs(z) == pytest.approx(1.959964, rel=1e-5)
    assert fieller(over, Estimate(0.05, 0.05**2, 1e9), 0.95) is None


def test_net_speed_by_hand() -> None:
    net = net_speed(1.31, (1.29, 1.33), 0.004, (0.001, 0.007))
    assert net.value == pytest.approx(1.31 / 1.004) and net.interval is not None
    below = math.hypot(math.log(1.31 / 1.29), math.log(1.007 / 1.004))
    assert net.interval[0] == pytest.approx(net.value * math.exp(-below))
    assert net_speed(1.31, None, 0.0, (0.0, 0.0)).interval == pytest.approx((1.31, 1.31))


def test_a_window_needs_points_of_every_run() -> None:
    x = np.arange(1.0, 101.0)
    assert last_window([(x, x), (x[:50], x[:50])], 1.0 / 3.0) is not None
    assert last_window([(x, x), (x[:5], x[:5])], 1.0 / 3.0, widest=0.8) is None
    assert last_window([(x, x), (np.zeros(0), np.zeros(0))], 1.0 / 3.0) is None
    window = last_window([(x, 2.0 * x), (x[::2], x[::2])], 0.5)
    assert window is not None and window.high == 99.0
    np.testing.assert_allclose(window.values[0], 2.0 * window.values[1], rtol=0.02)


@pytest.mark.parametrize(
    ("more", "interval", "sentence"),
    [
        (0.018, (0.012, 0.025), "1.8\u202f% (1.2 to 2.5) more"),
        (-0.004, (-0.009, 0.002), "0.4\u202f% (−0.2 to 0.9) fewer"),
        (0.00012, (0.0001, 0.00014), "0.01\u202f% (0.01 to 0.01) more"),
    ],
)
def test_the_cost_as_words(more: float, interval: tuple[float, float], sentence: str) -> None:
    assert share(more, interval) == sentence


def test_a_cost_with_a_boundless_interval_is_refused() -> None:
    # The seeds of the project differ far more than this loss is high: e to the interval's end is infinite.
    ours, theirs = 1e-6 * (power_law(TOKENS) + noisy(1)), 1e-6 * (power_law(TOKENS) + noisy(2))
    cost = tokens_cost([run(ours)], [run(theirs)], spread=LossSpread(0.01, 4.0))
    assert (cost.refusal, cost.interval) == ("wide", None)


def test_an_interval_of_many_times_the_steps_is_refused() -> None:
    ours, theirs = power_law(TOKENS) + noisy(1), power_law(TOKENS) + noisy(2)
    assert tokens_cost([run(ours)], [run(theirs)], spread=LossSpread(0.002, 8.0)).interval is not None
    assert tokens_cost([run(ours)], [run(theirs)], spread=LossSpread(0.2, 8.0)).refusal == "wide"


def test_the_headline_says_what_is_missing() -> None:
    speed: Any = (1.31, (1.29, 1.33))
    more: Any = (0.004, (0.001, 0.007))
    arguments: Any = {"axis": "tokens", "reason": "Why."}
    assert headline("FP8", speed, more, (1.305, (1.28, 1.33)), **arguments) == (
        "FP8 is 1.31\u202f× (1.29 to 1.33) faster and needs 0.4\u202f% (0.1 to 0.7) more tokens: "
        "1.30\u202f× (1.28 to 1.33) to the same loss."
    )
    assert headline("FP8", speed, None, None, **arguments) == (
        "FP8 is 1.31\u202f× (1.29 to 1.33) faster; how many more tokens it needs is not known. Why."
    )
    assert headline("FP8", None, more, None, **arguments).startswith(
        "FP8 needs 0.4\u202f% (0.1 to 0.7) more tokens"
    )
    assert headline("FP8", None, None, None, **arguments) == ""
    assert headline("FP8", speed, more, (1.305, (1.28, 1.33)), (0.88, None), **arguments) == (
        "FP8 is 1.31\u202f× (1.29 to 1.33) faster and takes 12\u202f% less memory. It needs "
        "0.4\u202f% (0.1 to 0.7) more tokens: 1.30\u202f× (1.28 to 1.33) to the same loss."
    )
    assert headline("FP8", (0.9, (0.8, 0.95)), None, None, (1.08, (1.07, 1.09)), **arguments) == (
        "FP8 runs at 0.90\u202f× (0.80 to 0.95) the speed of BF16 and takes 8.0\u202f% (7.0 to 9.0) more "
        "memory; how many more tokens it needs is not known. Why."
    )
    assert headline("FP8", (1.0, (0.9, 1.1)), None, None, (0.88, None), **arguments).startswith(
        "FP8 may be faster or slower than BF16: 1.00\u202f× (0.90 to 1.10), and takes 12\u202f% less memory;"
    )
    assert headline("FP8", None, None, None, (0.88, None), **arguments).startswith(
        "FP8 takes 12\u202f% less memory; its speed is not known. Both sides must log"
    )
    assert headline("FP8", None, more, None, (1.0, None), **arguments).endswith(
        "for the same loss and takes as much memory; its speed is not known. Why."
    )
    assert less_memory(1.0, (0.98, 1.02)) == "may take more or less memory: 1.00\u202f× (0.98 to 1.02)"
    assert less_memory(0.999, (0.998, 1.001)) == "takes as much memory"
    assert faster("FP8", 0.9, None) == "FP8 runs at 0.90\u202f× the speed of BF16"
    assert faster("FP8", 1.01, (0.99, 1.03)) == "FP8 is as fast as BF16: 1.01\u202f× (0.99 to 1.03)"
    unknown = faster("FP8", 0.84, (0.53, 1.5))
    assert unknown == "FP8 may be faster or slower than BF16: 0.84\u202f× (0.53 to 1.50)"


def test_a_ratio_that_is_uncertain_by_a_factor_of_ten_is_a_sentence() -> None:
    """It was '4.05 × (0.00 to 135304.16)'."""
    assert times(4.05, (0.0, 135304.16)) == "not known within a factor of 10"
    assert "135304" not in faster("FP8", 4.05, (0.0, 135304.16))
    assert times(1.31, (1.29, 1.33)) == "1.31\N{NARROW NO-BREAK SPACE}× (1.29 to 1.33)"
    both = headline(
        "FP8", (1.3, (1.2, 1.4)), (0.01, (0.0, 0.02)), (4.05, (0.0, 1e5)), axis="tokens", reason=""
    )
    assert both.endswith("tokens.") and "100000" not in both
