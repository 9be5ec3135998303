"""Seed variance, published spreads, quality of evaluations, and warnings about precision."""

from __future__ import annotations

import numpy as np
import pytest

from fp8scope_dashboard.analysis.scores import quality
from fp8scope_dashboard.analysis.scores.metrics import UNIT, default_margin, limits_of
from fp8scope_dashboard.analysis.scores.precision import warnings_of
from fp8scope_dashboard.analysis.scores.public_spreads import TABLE, spread_of
from fp8scope_dashboard.analysis.scores.seeds import ScoreSpread, own_spread, pooled, public_spread


def arm(seeds: int, n: int, offset: float, chance: np.random.Generator) -> np.ndarray:
    """Items with noise of 0.3 each, and runs with an offset each."""
    return chance.normal(0.0, 0.3, (seeds, n)) + chance.normal(0.0, offset, (seeds, 1))


def test_it_works() -> None:
    chance = np.random.default_rng(0)
    spread = own_spread([arm(4, 400, 0.05, chance), arm(1, 400, 0.0, chance)])
    assert spread is not None and spread.freedom == 3 and spread.seeds == 4
    assert spread.value is not None and 0.01 < spread.value < 0.15


def test_the_variance_that_items_explain_is_not_added_twice() -> None:
    chance = np.random.default_rng(2)
    spreads = [own_spread([arm(5, 200, 0.0, chance)]) for _ in range(400)]
    shares = [each.by_items / each.variance for each in spreads if each is not None]
    # Without an offset, s^2 is by items alone: 0.3^2 / 200 on average.
    assert np.mean([each.by_items for each in spreads if each]) == pytest.approx(0.09 / 200, rel=0.02)
    assert np.mean([each.variance for each in spreads if each]) == pytest.approx(0.09 / 200, rel=0.15)
    assert np.median(shares) == pytest.approx(1.0, abs=0.3)


def test_the_offset_between_seeds_is_estimated() -> None:
    chance = np.random.default_rng(3)
    added = [own_spread([arm(5, 200, 0.1, chance)]) for _ in range(400)]
    excess = np.mean([each.variance - each.by_items for each in added if each])
    assert excess == pytest.approx(0.01, rel=0.15)


def test_clustered_items_explain_more_of_the_spread() -> None:
    chance = np.random.default_rng(4)
    names = np.repeat(np.arange(20), 10).astype(str).tolist()
    by_items, variance = [], []
    for _ in range(300):
        items = np.repeat(chance.normal(0.0, 0.3, (4, 20)), 10, axis=1)
        spread = own_spread([items], names)
        assert spread is not None
        by_items.append(spread.by_items)
        variance.append(spread.variance)
    assert np.mean(by_items) == pytest.approx(0.09 / 20, rel=0.05)
    assert np.mean(variance) == pytest.approx(0.09 / 20, rel=0.15)


def test_single_runs_have_no_spread() -> None:
    assert own_spread([np.ones((1, 5)), np.ones((1, 5))]) is None


def test_pools_the_spread_over_tasks() -> None:
    spreads = [
        ScoreSpread(source="own", variance=v, by_items=1.0, freedom=2, seeds=3) for v in (0.5, 1.5, 1.0)
    ]
    result = pooled(spreads)
    assert [each.variance for each in result] == pytest.approx([1.0] * 3)
    assert {each.freedom for each in result} == {6}


def test_a_task_with_a_larger_spread_keeps_its_own() -> None:
    spreads = [ScoreSpread(source="own", variance=1.0, by_items=1.0, freedom=2, seeds=3)] * 9
    wide = ScoreSpread(source="own", variance=400.0, by_items=1.0, freedom=2, seeds=3)
    result = pooled([*spreads, wide])
    assert result[-1] is wide and result[0].freedom == 20
    assert pooled([wide]) == [wide]


@pytest.mark.parametrize(
    ("name", "benchmark"),
    [
        ("mmlu", "MMLU"),
        ("leaderboard/gsm8k", "GSM8K"),
        ("ARC Challenge", "ARC-C"),
        ("hellaswag_5shot", "HellaSwag"),
        ("social_iqa", "SIQA"),
        ("AGIEval", "AGIEval"),
        ("mmlu_pro", None),
        ("our own mmlu-like task", None),
        ("", None),
    ],
)
def test_recognises_benchmarks_by_name(name: str, benchmark: str | None) -> None:
    fact = spread_of(name)
    assert (fact.benchmark if fact else None) == benchmark


def test_the_public_spread_is_that_of_the_table() -> None:
    spread = public_spread("agieval", 0.1)
    assert spread is not None and spread.value == pytest.approx(0.0163) and spread.source == "public"
    assert public_spread("gsm8k", 0.0).value == pytest.approx(0.0087)  # type: ignore[union-attr]
    # The published plus-minus of SIQA is over items, not seeds.
    assert public_spread("siqa", 0.1) is None


def test_published_half_widths_are_normal_intervals() -> None:
    """Madaan et al. 2024, table 1: MMLU .72 and SIQA 2.21 per cent."""
    facts = {fact.benchmark: fact for fact in TABLE}
    mmlu = facts["MMLU"]
    assert mmlu.mean is not None
    assert 100 * quality.half_width(mmlu.mean / 100, mmlu.items) == pytest.approx(0.72, abs=0.005)
    # The mean of SIQA is about 46 per cent; the width hardly depends on it.
    assert 100 * quality.half_width(0.46, facts["SIQA"].items) == pytest.approx(2.21, abs=0.005)


def test_millers_number_of_questions() -> None:
    """Miller (2024), section 5: 969 questions for 3 points; 13.3 and 7.6 points with 198 questions."""
    assert quality.items_needed(0.03, 1 / 9) == 969
    one, ten = (
        quality.smallest_effect(198, 1 / 9, (1 / 6, 1 / 6), samples) for samples in ((1, 1), (10, 10))
    )
    assert 100 * one == pytest.approx(13.3, abs=0.05) and 100 * ten == pytest.approx(7.6, abs=0.05)


def test_items_for_a_margin() -> None:
    needs = quality.required_sample(0.01, variance=0.05 / 500, units=500, further=0.0, runs=1, critical=1.645)
    assert needs.items == pytest.approx((1.645 + 0.8416) ** 2 * 0.05 / 0.01**2, rel=1e-3)
    stuck = quality.required_sample(0.01, variance=1e-4, units=500, further=1e-3, runs=3, critical=1.645)
    assert stuck.items is None and (stuck.seeds or 0) > 100


def test_monotonicity() -> None:
    steps = [10, 20, 30, 40]
    assert quality.monotonicity(steps, [1, 2, 3, 4], higher_is_better=True) == pytest.approx(1.0)
    assert quality.monotonicity(steps, [1, 2, 3, 4], higher_is_better=False) == pytest.approx(-1.0)
    assert quality.monotonicity(steps, [1, 2, 4, 3], higher_is_better=True) == pytest.approx(2 / 3)
    assert quality.monotonicity([1, 2], [1, 2], higher_is_better=True) is None
    assert quality.monotonicity(steps, [1, 1, 1, 1], higher_is_better=True) is None


def test_signal_to_noise() -> None:
    assert quality.signal_to_noise(0.25, 0.005) == pytest.approx(50.0)
    assert quality.signal_to_noise(0.25, None) is None and quality.signal_to_noise(0.25, 0.0) is None


def test_metrics_know_their_range_and_margin() -> None:
    shares, losses = np.array([0.2, 0.9]), np.array([1.5, 2.5])
    assert limits_of("proportion", "anything") == UNIT and limits_of("mean", "F1", shares) == UNIT
    assert limits_of("mean", "pass@1", shares) == UNIT
    assert limits_of("mean", "accuracy", 100 * shares).high == np.inf
    assert limits_of("mean", "nll", losses) == (0.0, np.inf) and limits_of("mean", "score", losses).low < 0
    assert default_margin("proportion", "accuracy", 0.6, UNIT, 0.0025) == 0.01
    assert default_margin("mean", "nll", 2.0, limits_of("mean", "nll", losses), 0.0025) == 0.005
    assert default_margin("mean", "score", -50.0, limits_of("mean", "score", losses), 0.0025) == 0.5


@pytest.mark.parametrize(
    ("trained", "evaluated", "baseline", "words"),
    [
        ("fp8", "bf16", ["bf16"], ["Trained in FP8, evaluated in BF16"]),
        ("fp8", "fp16", ["fp16"], ["values above 65,504 overflow"]),
        ("bf16", "fp16", ["bf16"], ["overflow", "the baseline in BF16"]),
        ("fp8", "fp8", ["bf16", None], ["Evaluated in FP8, the baseline in BF16"]),
        ("fp8", "fp8", ["fp8"], []),
        ("fp8", None, ["bf16"], []),
        ("bf16", "bf16", [None], []),
    ],
)
def test_warns_of_the_precision_of_an_evaluation(
    trained: str, evaluated: str | None, baseline: list[str | None], words: list[str]
) -> None:
    sentences = warnings_of(trained, evaluated, baseline)
    assert len(sentences) == len(words)
    for sentence, part in zip(sentences, words, strict=True):
        assert part in sentence
