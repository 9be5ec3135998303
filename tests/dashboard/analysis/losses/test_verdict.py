"""The verdict on the loss of a run and its explanation."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - a later import would make the first example miss its deadline
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.analysis.losses.result import METHOD_VERSION, LossComparison
from fp8scope_dashboard.analysis.losses.verdict import CURVE_POINTS, compare_losses

STEPS = np.arange(300)
# The noise of the data, which is the same in every run that reads the same batches.
BATCHES = np.random.default_rng(99).normal(0.0, 0.05, len(STEPS))


def curve(seed: int, factor: float = 1.0, spread: float = 0.001, steps: np.ndarray = STEPS) -> LossCurve:
    chance = np.random.default_rng(seed)
    level = 2.0 + 3.0 * np.exp(-steps / 60.0) + BATCHES[: len(steps)]
    return LossCurve(
        steps=steps,
        losses=factor * (1.0 + spread * chance.normal()) * level + chance.normal(0, 0.002, len(steps)),
    )


def compare(runs: list[LossCurve], baselines: list[LossCurve]) -> LossComparison:
    result = compare_losses(runs, baselines, margin=0.0025, alpha=0.05)
    json.dumps(result.as_dict(), allow_nan=False)
    assert result.explanation.endswith(".")
    return result


def test_it_works() -> None:
    result = compare([curve(0)], [curve(1), curve(2), curve(3)])
    assert result.verdict == "equivalent" and result.p_value is None
    assert (result.k_run, result.k_baseline, result.aligned_on) == (1, 3, "steps")
    assert result.window is not None and result.window[0] <= 270.0 and result.window[1] == 299.0
    assert result.delta is not None and abs(result.delta) < 0.005
    assert result.interval is not None and result.interval[0] < result.delta < result.interval[1]
    assert result.explanation.startswith("In the last compared window the loss is 2.0")
    assert "could have gone unseen" in result.explanation and result.needs is None
    assert result.seed_spread is not None and result.seed_spread["source"] == "own"
    assert result.as_dict()["method_version"] == METHOD_VERSION


@pytest.mark.parametrize(("factor", "verdict"), [(1.02, "worse"), (0.98, "better")])
def test_a_run_that_differs_is_worse_or_better(factor: float, verdict: str) -> None:
    result = compare([curve(0, factor)], [curve(1), curve(2), curve(3)])
    assert result.verdict == verdict
    assert result.delta == pytest.approx(factor - 1.0, abs=0.005)
    assert ("above" if factor > 1 else "below") in result.explanation


@pytest.mark.parametrize("baselines", [1, 3])
def test_short_noisy_runs_of_one_configuration_get_no_wrong_verdict(baselines: int) -> None:
    """38 points with noise of 5 %: 80 to 90 % of such pairs were 'over'."""
    steps, wrong = np.arange(38), 0
    chance = np.random.default_rng(5)
    for _ in range(60):
        runs = [
            LossCurve(steps=steps, losses=1.2 + 0.06 * chance.normal(size=38)) for _ in range(baselines + 1)
        ]
        result = compare(runs[:1], runs[1:])
        wrong += result.verdict in ("worse", "better")
        if result.verdict == "cannot_tell":
            assert result.needs is not None and "Cannot tell yet" in result.explanation
    assert wrong <= 3


def test_the_needed_steps_decide() -> None:
    def noisy(points: int, factor: float, seed: int) -> LossCurve:
        noise = 0.03 * np.random.default_rng(seed).normal(size=points)
        return LossCurve(steps=np.arange(points), losses=factor * (3.0 + noise))

    short = compare([noisy(400, 1.03, 1)], [noisy(400, 1.0, 2)])
    assert short.verdict == "worse"
    close = compare([noisy(400, 1.007, 1)], [noisy(400, 1.0, 2)])
    assert close.verdict == "cannot_tell" and close.needs is not None and close.needs["steps"] is not None
    more = 400 + 2 * close.needs["steps"]
    assert compare([noisy(more, 1.007, 1)], [noisy(more, 1.0, 2)]).verdict == "worse"


def test_looking_twenty_times_is_free() -> None:
    chance = np.random.default_rng(6)
    wrong = 0
    for _ in range(30):
        pair = [LossCurve(steps=STEPS, losses=2.0 + 0.05 * chance.normal(size=300)) for _ in range(2)]
        looks = [
            [LossCurve(steps=each.steps[:n], losses=each.losses[:n]) for each in pair]
            for n in range(30, 301, 15)
        ]
        wrong += any(compare([run], [base]).verdict in ("worse", "better") for run, base in looks)
    assert wrong <= 1


def test_few_baselines_have_the_spread_of_other_runs() -> None:
    """With two seeds the tolerance was the margin, and a difference of seeds was 'over'."""
    two = compare([curve(0, 1.003)], [curve(1), curve(2)])
    assert two.tolerance is not None and two.tolerance > 0.0025
    assert two.seed_spread is not None and two.seed_spread["source"] == "public"
    many = compare([curve(0, 1.01)], [curve(1, 0.98), curve(2), curve(3, 1.02)])
    assert many.tolerance is not None and many.tolerance > 0.02 and many.verdict == "cannot_tell"
    assert any("far more than comparable runs" in warning for warning in many.warnings)


def test_alpha_moves_the_tolerance() -> None:
    baselines = [curve(seed) for seed in (1, 2, 3)]
    strict, loose = (
        compare_losses([curve(0)], baselines, margin=0.0025, alpha=alpha) for alpha in (0.001, 0.2)
    )
    assert strict.tolerance is not None and loose.tolerance is not None
    assert strict.tolerance > 1.5 * loose.tolerance


def test_a_baseline_that_diverged_but_stayed_finite_is_named_and_left_out() -> None:
    """It made the tolerance 38.6 %."""
    odd = replace(curve(4, 1.4), name="bf16 seed 4")
    result = compare([curve(0, 1.02)], [curve(1), curve(2), curve(3), odd])
    assert result.verdict == "worse" and result.k_baseline == 3
    assert result.seed_spread is not None and result.seed_spread["odd"] == [3]
    assert result.basis is not None and result.basis.baselines == (0, 1, 2)
    assert any("bf16 seed 4" in warning for warning in result.warnings)


def test_baselines_that_are_left_out_are_said() -> None:
    short = [curve(seed, steps=STEPS[:100]) for seed in (3, 4)]
    result = compare([curve(0)], [curve(1), curve(2), *short])
    assert result.k_baseline == 2 and result.tolerance is not None and result.tolerance > 0.0025
    assert any("run 3, run 4" in warning for warning in result.warnings)
    assert any("4 baseline runs 2 remain" in warning for warning in result.warnings)


def test_several_seeds_are_tested_for_equivalence() -> None:
    baselines = [curve(seed, spread=0.0003) for seed in range(5)]
    same = compare([curve(10 + seed, spread=0.0003) for seed in range(5)], baselines)
    other = compare([curve(20 + seed, 1.01, spread=0.0003) for seed in range(5)], baselines)
    noisy = compare([curve(30 + seed, spread=0.01) for seed in range(2)], baselines)
    assert [result.verdict for result in (same, other, noisy)] == ["equivalent", "worse", "cannot_tell"]
    assert same.interval is not None and same.interval[0] > -0.0025 and same.interval[1] < 0.0025
    assert other.interval is not None and other.interval[0] > 0.0025
    assert "90 % interval" in same.explanation
    assert noisy.needs is not None and noisy.needs["seeds"] is not None and noisy.needs["seeds"] > 2


def test_ended_seeds_need_few_points() -> None:
    """Evaluation curves have seven points or so; the seeds show the noise."""
    steps = np.arange(1, 8) * 200

    def seeds(factor: float, first: int) -> list[LossCurve]:
        made = (curve(first + i, factor, steps=steps) for i in range(5))
        return [replace(each, planned=1400) for each in made]

    assert compare(seeds(1.0, 0), seeds(1.0, 10)).verdict == "equivalent"
    assert compare(seeds(1.01, 0), seeds(1.0, 10)).verdict == "worse"
    # One run against seeds, and seeds that still run, have nothing that shows their noise.
    alone = compare(seeds(1.01, 0)[:1], seeds(1.0, 10))
    running = compare([replace(each, planned=5000) for each in seeds(1.01, 0)], seeds(1.0, 10))
    assert alone.verdict == running.verdict == "cannot_tell" and "20" in alone.explanation


def test_a_run_that_diverges_is_worse_although_its_loss_still_rises() -> None:
    chance = np.random.default_rng(5)
    steps = np.arange(600)
    rise = 1.0 + np.maximum(steps - 240, 0) * 0.002
    level = 1.5 + np.exp(-steps / 100.0)
    faulty, *baselines = (
        LossCurve(steps=steps, losses=level * factor * (1.0 + 0.02 * chance.normal(size=600)), planned=599)
        for factor in (rise, 1.0, 1.0, 1.0)
    )
    assert compare([faulty], baselines).verdict == compare([faulty], baselines[:1]).verdict == "worse"


@pytest.mark.parametrize(("length", "ended"), [(330, True), (330, False), (297, True)])
def test_schedules_of_other_lengths(length: int, ended: bool) -> None:
    """A run 10 % longer than its baseline was 'over' in all cases: its learning rate is still high."""

    def trained(seed: int, planned: int, done: int) -> LossCurve:
        steps = np.arange(done)
        decay = 0.5 * (1.0 + np.cos(np.pi * steps / planned))
        losses = 3.0 + 0.4 * decay + np.random.default_rng(seed).normal(0.0, 0.004, done)
        return LossCurve(steps=steps, losses=losses, planned=planned)

    result = compare([trained(0, length, length if ended else 290)], [trained(1, 300, 300)])
    assert result.verdict in ("equivalent", "cannot_tell")
    differs = length == 330
    assert any("schedule is 10 % longer" in warning for warning in result.warnings) == differs
    if differs and not ended:
        assert result.verdict == "cannot_tell"


def test_a_run_ahead_of_its_baseline_without_plans_gets_no_verdict() -> None:
    result = compare([curve(0, 1.02)], [curve(1, steps=STEPS[:260])])
    assert result.verdict == "cannot_tell" and any("total_steps" in warning for warning in result.warnings)


def test_a_loss_near_zero_is_compared_in_nats() -> None:
    """The relative delta was -1,150 % and 'within'."""
    steps = np.arange(200)
    chance = np.random.default_rng(7)
    curves = [
        LossCurve(steps=steps, losses=np.exp(-steps / 20.0) + 0.002 * chance.normal(size=200))
        for _ in range(2)
    ]
    result = compare(curves[:1], curves[1:])
    assert result.unit == "nats" and result.delta is not None and abs(result.delta) < 0.005
    assert (
        result.verdict == "cannot_tell" and "nats" not in result.explanation and "%" not in result.explanation
    )
    worse = replace(curves[0], losses=curves[0].losses + 0.1)
    assert compare([worse], curves[1:]).verdict == "worse"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_is_worse_with_the_reason(value: float) -> None:
    broken = curve(0)
    broken.losses[150:] = value
    result = compare([broken], [curve(1), curve(2), curve(3)])
    assert result.verdict == "worse" and result.delta is None
    assert result.explanation == "The loss is NaN or infinite since step 150."


def test_a_run_that_stopped_at_its_nan_is_worse() -> None:
    losses = curve(0).losses[:120].copy()
    losses[119] = math.nan
    result = compare([LossCurve(steps=STEPS[:120], losses=losses)], [curve(1)])
    assert result.verdict == "worse" and "since step 119" in result.explanation


def test_one_diverged_seed_makes_the_arm_worse() -> None:
    broken = LossCurve(steps=STEPS[:100], losses=np.full(100, math.nan))
    result = compare([curve(0), curve(1), broken], [curve(2), curve(3)])
    assert result.verdict == "worse" and "1 of 3 runs" in result.explanation


def test_a_sibling_that_died_at_step_5_does_not_block_the_verdict() -> None:
    dead = LossCurve(steps=STEPS[:5], losses=np.array([5.0, 5.0, 5.0, 5.0, math.nan]), name="fp8 seed 2")
    result = compare([curve(0), dead], [curve(1), curve(2), curve(3)])
    assert result.verdict == "equivalent" and result.k_run == 1
    assert any("fp8 seed 2" in warning for warning in result.warnings)


@pytest.mark.parametrize("at", [100, 280])
def test_a_nan_that_recovered_is_said_but_is_not_worse(at: int) -> None:
    lapsed = curve(0)
    lapsed.losses[at] = math.nan
    result = compare([lapsed], [curve(1), curve(2), curve(3)])
    assert result.verdict == "equivalent"
    assert any(f"at step {at} and has recovered" in warning for warning in result.warnings)


def test_a_diverged_baseline_seed_is_left_out() -> None:
    broken = curve(3)
    broken.losses[200:] = math.nan
    result = compare([curve(0)], [curve(1), curve(2), broken])
    assert result.k_baseline == 2 and result.verdict in ("equivalent", "cannot_tell")
    assert any("run 3" in warning for warning in result.warnings)
    assert compare([curve(0)], [broken]).verdict == "cannot_tell"


def test_a_baseline_seed_that_has_only_begun_does_not_shorten_the_range() -> None:
    begun = curve(3, steps=STEPS[:30])
    result = compare([curve(0)], [curve(1), curve(2), begun])
    assert result.k_baseline == 2 and result.window is not None and result.window[1] == 299.0


def test_a_running_run_is_compared_up_to_its_last_step() -> None:
    result = compare([curve(0, steps=STEPS[:100])], [curve(1), curve(2), curve(3)])
    assert result.window is not None and result.window[1] == 99.0 and result.k_baseline == 3


@pytest.mark.parametrize(
    ("runs", "baselines", "words"),
    [
        ([curve(0)], [], "no run with a loss yet"),
        ([LossCurve(steps=STEPS[:0], losses=np.empty(0))], [curve(1)], "not logged a loss"),
        ([LossCurve(steps=STEPS[:0], losses=np.empty(0))], [], "not logged a loss"),
        ([curve(0, steps=STEPS[:10])], [curve(1)], "10 points of loss in common; a verdict needs 20"),
    ],
)
def test_the_explanation_names_missing_data(
    runs: list[LossCurve], baselines: list[LossCurve], words: str
) -> None:
    result = compare(runs, baselines)
    assert result.verdict == "cannot_tell" and words in result.explanation


def test_what_was_not_compared_is_not_said_to_be_compared() -> None:
    late = replace(curve(0, steps=STEPS[150:]), planned=300)
    result = compare([late], [replace(curve(1, steps=STEPS[:140]), planned=140)])
    assert "0 points" in result.explanation and result.warnings == ()


def test_pairing_cancels_the_noise_of_the_batches() -> None:
    result = compare([curve(0, spread=0.0)], [curve(1, spread=0.0)])
    assert result.paired == "steps" and result.noise_interval is not None
    # The batches change the loss by 2.5 %; the interval of the difference is far narrower.
    assert np.diff(result.noise_interval)[0] < 0.002


def test_runs_on_different_batch_sizes_are_aligned_on_tokens() -> None:
    tokens = 1000.0 * np.arange(1.0, 301.0)
    level = 2.0 + 3.0 * np.exp(-tokens / 60_000.0)
    run = LossCurve(steps=STEPS[:150], losses=level[1::2] * 1.001, tokens=tokens[1::2])
    result = compare([run], [LossCurve(steps=STEPS, losses=level, tokens=tokens)])
    assert result.aligned_on == "tokens" and result.paired == "steps"
    assert result.delta == pytest.approx(0.001, abs=1e-6)


def test_the_curve_is_bounded_and_shows_the_difference() -> None:
    steps = np.arange(20_000)
    levels = 2.0 + np.exp(-steps / 3000.0)
    result = compare([LossCurve(steps=steps, losses=levels * 1.01)], [LossCurve(steps=steps, losses=levels)])
    shown = result.curve
    assert len(shown["x"]) == len(shown["delta"]) == len(shown["low"]) == len(shown["high"]) <= CURVE_POINTS
    assert shown["delta"] == pytest.approx([0.01] * len(shown["x"]), abs=3e-4) and shown["x_name"] == "steps"


losses = hnp.arrays(np.float64, st.integers(0, 60), elements=st.floats(allow_nan=True, allow_infinity=True))
levels = st.sampled_from([0.0, 1e-100, 3e-100, 1e-30, 1.0, 8.2e76, 1e100]).flatmap(
    lambda level: st.sampled_from([level, -level])
)


@given(st.lists(losses, min_size=2, max_size=5), st.integers(1, 3))
def test_any_input_gives_a_verdict_in_strict_json(values: list[np.ndarray], split: int) -> None:
    curves = [LossCurve(steps=np.arange(len(losses)), losses=losses) for losses in values]
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
def test_an_ill_conditioned_ratio_of_means_is_undecided(runs: list[float], baselines: list[float]) -> None:
    ours, theirs = (
        [LossCurve(steps=np.arange(20), losses=np.full(20, mean)) for mean in arm]
        for arm in (runs, baselines)
    )
    result = compare(ours, theirs)
    assert result.verdict == "cannot_tell"


@given(st.lists(levels, min_size=2, max_size=6), st.integers(1, 3))
def test_means_of_very_different_magnitudes_give_a_verdict(values: list[float], split: int) -> None:
    wave = 1.0 + 0.1 * np.sin(np.arange(20))
    curves = [LossCurve(steps=np.arange(20), losses=np.clip(value * wave, -1e100, 1e100)) for value in values]
    cut = min(split, len(curves) - 1)
    compare(curves[:cut], curves[cut:])


def test_no_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare_losses([], [curve(0)], margin=0.0025, alpha=0.05)
