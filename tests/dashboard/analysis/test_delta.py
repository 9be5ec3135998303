"""The verdict on the loss of a run and its explanation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - a later import would make the first example miss its deadline
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8scope_dashboard.analysis.alignment import Curve
from fp8scope_dashboard.analysis.delta import CURVE_POINTS, LossComparison, compare_losses

STEPS = np.arange(300)
# The noise of the data, which is the same in every run that reads the same batches.
BATCHES = np.random.default_rng(99).normal(0.0, 0.05, len(STEPS))


def curve(seed: int, factor: float = 1.0, spread: float = 0.001, steps: np.ndarray = STEPS) -> Curve:
    chance = np.random.default_rng(seed)
    level = 2.0 + 3.0 * np.exp(-steps / 60.0) + BATCHES[: len(steps)]
    return Curve(
        steps, factor * (1.0 + spread * chance.normal()) * level + chance.normal(0, 0.002, len(steps))
    )


def compare(runs: list[Curve], baselines: list[Curve]) -> LossComparison:
    result = compare_losses(runs, baselines, margin=0.0025, alpha=0.05)
    json.dumps(result.as_dict(), allow_nan=False)
    assert result.explanation.endswith(".")
    return result


def test_it_works() -> None:
    result = compare([curve(0)], [curve(1), curve(2), curve(3)])
    assert result.verdict == "within" and result.interval is None and result.p_value is None
    assert (result.k_run, result.k_baseline, result.aligned_on) == (1, 3, "steps")
    assert result.window == (270.0, 299.0)
    assert result.delta is not None and abs(result.delta) < 0.005
    assert result.explanation.startswith("In the last compared window the loss is 2.0")


@pytest.mark.parametrize("factor", [1.02, 0.98])
def test_a_run_that_differs_is_over_on_either_side(factor: float) -> None:
    result = compare([curve(0, factor)], [curve(1), curve(2), curve(3)])
    assert result.verdict == "over"
    assert result.delta == pytest.approx(factor - 1.0, abs=0.005)
    assert ("above" if factor > 1 else "below") in result.explanation


def test_the_spread_between_seeds_widens_the_tolerance() -> None:
    few = compare([curve(0, 1.01)], [curve(seed, spread=0.02) for seed in (1, 2)])
    many = compare([curve(0, 1.01)], [curve(seed, spread=0.02) for seed in (1, 2, 3)])
    assert few.tolerance == 0.0025 and few.verdict == "over"
    assert many.tolerance is not None and many.tolerance > 0.02 and many.verdict == "within"


def test_several_seeds_are_tested_for_equivalence() -> None:
    baselines = [curve(seed, spread=0.0003) for seed in range(5)]
    same = compare([curve(10 + seed, spread=0.0003) for seed in range(5)], baselines)
    other = compare([curve(20 + seed, 1.01, spread=0.0003) for seed in range(5)], baselines)
    noisy = compare([curve(30 + seed, spread=0.01) for seed in range(2)], baselines)
    assert [result.verdict for result in (same, other, noisy)] == ["equivalent", "different", "inconclusive"]
    assert same.interval is not None and same.interval[0] > -0.0025 and same.interval[1] < 0.0025
    assert other.interval is not None and other.interval[0] > 0.0025
    assert "90% interval" in same.explanation


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_is_over_with_the_reason(value: float) -> None:
    broken = curve(0)
    broken.losses[150:] = value
    result = compare([broken], [curve(1), curve(2), curve(3)])
    assert result.verdict == "over" and result.delta is None
    assert result.explanation == "The loss is NaN or infinite in the last compared window, since step 150."


def test_a_run_that_stopped_at_its_nan_is_over() -> None:
    losses = curve(0).losses[:120].copy()
    losses[119] = math.nan
    result = compare([Curve(STEPS[:120], losses)], [curve(1)])
    assert result.verdict == "over" and "since step 119" in result.explanation


def test_one_diverged_seed_makes_the_arm_different() -> None:
    broken = Curve(STEPS[:100], np.full(100, math.nan))
    result = compare([curve(0), curve(1), broken], [curve(2), curve(3)])
    assert result.verdict == "different" and "1 of 3 runs" in result.explanation


def test_ignores_a_nan_before_the_window() -> None:
    lapsed = curve(0)
    lapsed.losses[100] = math.nan
    result = compare([lapsed], [curve(1), curve(2), curve(3)])
    assert result.verdict == "within"
    assert 100.0 not in result.curve["x"]


def test_a_diverged_baseline_seed_is_left_out() -> None:
    broken = curve(3)
    broken.losses[200:] = math.nan
    result = compare([curve(0)], [curve(1), curve(2), broken])
    assert result.k_baseline == 2 and result.verdict in ("within", "over")
    assert compare([curve(0)], [broken]).verdict == "insufficient"


def test_a_baseline_seed_that_has_only_begun_does_not_shorten_the_range() -> None:
    begun = curve(3, steps=STEPS[:30])
    result = compare([curve(0)], [curve(1), curve(2), begun])
    assert result.k_baseline == 2 and result.window == (270.0, 299.0)


def test_a_running_run_is_compared_up_to_its_last_step() -> None:
    result = compare([curve(0, steps=STEPS[:100])], [curve(1), curve(2), curve(3)])
    assert result.window == (90.0, 99.0) and result.k_baseline == 3


@pytest.mark.parametrize(
    ("runs", "baselines", "words"),
    [
        ([curve(0)], [], "no run with a loss yet"),
        ([Curve(STEPS[:0], np.empty(0))], [curve(1)], "not logged a loss"),
        ([curve(0, steps=STEPS[:10])], [curve(1)], "10 points of loss in common; a verdict needs 20"),
        ([curve(0)], [Curve(STEPS, np.zeros(300))], "is 0 in the last compared window"),
    ],
)
def test_the_explanation_names_missing_data(runs: list[Curve], baselines: list[Curve], words: str) -> None:
    result = compare(runs, baselines)
    assert result.verdict == "insufficient" and words in result.explanation


def test_pairing_cancels_the_noise_of_the_batches() -> None:
    result = compare([curve(0, spread=0.0)], [curve(1, spread=0.0)])
    assert result.paired and result.noise_interval is not None
    # The batches change the loss by 2.5 %; the interval of the difference is far narrower.
    assert np.diff(result.noise_interval)[0] < 0.002


def test_runs_on_different_batch_sizes_are_aligned_on_tokens() -> None:
    tokens = 1000.0 * np.arange(1.0, 301.0)
    level = 2.0 + 3.0 * np.exp(-tokens / 60_000.0)
    run = Curve(STEPS[:150], level[1::2] * 1.001, tokens[1::2])
    result = compare([run], [Curve(STEPS, level, tokens)])
    assert result.aligned_on == "tokens" and result.paired
    assert result.delta == pytest.approx(0.001, abs=1e-6)


def test_the_curve_is_bounded_and_shows_the_difference() -> None:
    steps = np.arange(20_000)
    levels = 2.0 + np.exp(-steps / 3000.0)
    result = compare([Curve(steps, levels * 1.01)], [Curve(steps, levels)])
    shown = result.curve
    assert len(shown["x"]) == len(shown["delta"]) == len(shown["low"]) == len(shown["high"]) <= CURVE_POINTS
    assert shown["delta"] == pytest.approx([0.01] * len(shown["x"])) and shown["x_name"] == "steps"


losses = hnp.arrays(np.float64, st.integers(0, 60), elements=st.floats(allow_nan=True, allow_infinity=True))
levels = st.sampled_from([0.0, 1e-100, 3e-100, 1e-30, 1.0, 8.2e76, 1e100]).flatmap(
    lambda level: st.sampled_from([level, -level])
)


@given(st.lists(losses, min_size=2, max_size=5), st.integers(1, 3))
def test_any_input_gives_a_verdict_in_strict_json(values: list[np.ndarray], split: int) -> None:
    curves = [Curve(np.arange(len(losses)), losses) for losses in values]
    cut = min(split, len(curves) - 1)
    compare(curves[:cut], curves[cut:])


@pytest.mark.parametrize(
    ("runs", "baselines"),
    [
        # Found by the test above: the square of the ratio of the means overflows.
        ([0.0, 8.2e76], [0.0, 1.0]),
        ([0.0, 1e100], [1e-100, 3e-100]),
        # Much larger numbers cancel out in the mean of the baselines.
        ([1e100, 1e100], [1e100, -1e100, 3e-100]),
    ],
)
def test_an_ill_conditioned_ratio_of_means_is_inconclusive(runs: list[float], baselines: list[float]) -> None:
    ours, theirs = ([Curve(np.arange(20), np.full(20, mean)) for mean in arm] for arm in (runs, baselines))
    result = compare(ours, theirs)
    assert result.verdict == "inconclusive" and result.interval is not None
    assert result.interval[0] < 0.0 < result.interval[1]


@given(st.lists(levels, min_size=2, max_size=6), st.integers(1, 3))
def test_means_of_very_different_magnitudes_give_a_verdict(values: list[float], split: int) -> None:
    wave = 1.0 + 0.1 * np.sin(np.arange(20))
    curves = [Curve(np.arange(20), np.clip(value * wave, -1e100, 1e100)) for value in values]
    cut = min(split, len(curves) - 1)
    compare(curves[:cut], curves[cut:])


def test_no_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare_losses([], [curve(0)], margin=0.0025, alpha=0.05)
