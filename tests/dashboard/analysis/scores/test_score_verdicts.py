"""The three-way verdict on scores, over one task and over several."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.analysis.scores.evidence import baseline_interval, item_interval
from fp8scope_dashboard.analysis.scores.result import RunScore, ScoreComparison, TaskScores
from fp8scope_dashboard.analysis.scores.seeds import SeedGroup
from fp8scope_dashboard.analysis.scores.spending import shares
from fp8scope_dashboard.analysis.scores.summary import summarise
from fp8scope_dashboard.analysis.scores.verdict import compare_scores, holm, judge

ALPHA = 0.05


def answers(right: int, n: int = 100, **fields: Any) -> RunScore:
    return RunScore(np.repeat([1.0, 0.0], [right, n - right]), **fields)


def proportion(arm: list[RunScore], baselines: list[RunScore], **fields: Any) -> TaskScores:
    task = TaskScores(
        name="heldout",
        metric="accuracy",
        kind="proportion",
        higher_is_better=True,
        arm=arm,
        baselines=baselines,
    )
    return replace(task, **fields)


def mean(arm: list[RunScore], baselines: list[RunScore], **fields: Any) -> TaskScores:
    task = TaskScores(
        name="heldout", metric="nll", kind="mean", higher_is_better=False, arm=arm, baselines=baselines
    )
    return replace(task, **fields)


def compared(task: TaskScores) -> ScoreComparison:
    return compare_scores(task, alpha=ALPHA)


def flipped(score: RunScore, right: int, wrong: int) -> RunScore:
    """The score with the first `wrong` right items made wrong, and the last `right` wrong ones right."""
    items = score.items.copy()
    items[:wrong] = 0.0
    items[len(items) - right :] = 1.0
    return RunScore(items, score.item_ids, score.clusters)


def test_it_works() -> None:
    base = answers(300, 500)
    result = compared(proportion([flipped(base, 1, 13)], [base]))
    assert result.verdict == "worse" and result.n == 500 and result.k_baseline == 1
    assert result.score == pytest.approx(0.576) and result.difference == pytest.approx(-0.024)
    assert result.margin == 0.01 and result.method_version == 3
    assert "worse (p = " in result.explanation


def test_a_harm_inside_the_interval_of_bf16_is_no_all_clear() -> None:
    """The green check that stood beside a paired test with p = 2e-6."""
    base = answers(300, 500)
    result = compared(proportion([flipped(base, 0, 19)], [base]))
    assert result.inside is True and result.verdict == "worse"
    assert result.p_value is not None and result.p_value < 1e-4
    assert "inside BF16's 95 % interval; a harm below" in result.explanation


def test_a_few_items_cannot_tell_and_say_what_would() -> None:
    result = compared(proportion([answers(60)], [answers(61)]))
    assert result.verdict == "cannot_tell" and result.inside is True
    # The spread between seeds hides a point, however many items there are.
    assert result.needs is not None and result.needs["items"] is None and (result.needs["seeds"] or 0) > 2
    assert "seeds in each arm" in result.explanation and "could not have been seen" in result.explanation


def test_identical_answers_are_equivalent_within_what_so_many_items_would_not_show() -> None:
    many, few = (compared(proportion([answers(n // 2, n)], [answers(n // 2, n)])) for n in (500, 80))
    assert many.verdict == few.verdict == "equivalent"
    # 1 - 0.05^(1/80): a larger share of changed answers would have shown with 95 %.
    assert (many.equivalent_within, few.equivalent_within) == pytest.approx((0.01, 0.03675), abs=1e-5)
    assert "Identical to BF16 item by item" in few.explanation
    assert "within ±3.68 percentage points" in few.explanation
    assert few.difference_interval is not None and few.difference_interval.high == few.equivalent_within


def test_identical_losses_are_equivalent() -> None:
    items = np.random.default_rng(0).normal(2.0, 0.5, 40)
    result = compared(mean([RunScore(items)], [RunScore(items.copy())]))
    assert result.verdict == "equivalent" and result.equivalent_within == result.margin
    constant = compared(mean([RunScore(np.full(40, 2.0))], [RunScore(np.full(40, 2.0))]))
    assert constant.verdict == "equivalent" and "+0 to +0" not in constant.explanation


def test_a_shift_of_every_item_has_one_interval_and_verdict() -> None:
    """It was 'worse (p = 3e-151)' with an interval over 0."""
    items = np.random.default_rng(0).normal(3.0, 0.5, 500)
    small, large = (compared(mean([RunScore(items + shift)], [RunScore(items)])) for shift in (0.001, 1.0))
    assert small.verdict == "cannot_tell" and large.verdict == "worse"
    assert small.difference_interval is not None and small.difference_interval.holds(0.0)
    assert large.difference_interval is not None and large.difference_interval.low > 0.0
    assert small.p_value is not None and small.p_value > 0.05


@given(st.integers(0, 15), st.integers(0, 15), st.integers(40, 600), st.floats(0.01, 1.0))
def test_interval_and_verdict_agree(right: int, wrong: int, n: int, share: float) -> None:
    base = answers(n // 2, n)
    task = proportion([flipped(base, right, wrong)], [base])
    (result,) = judge([task], alpha=ALPHA, alpha_share=share)
    interval = result.difference_interval
    if right == wrong == 0:
        assert result.verdict == "equivalent"
        return
    assert interval is not None and result.p_adjusted is not None and result.equivalent_within != 0.0
    assert (result.verdict == "worse") == (interval.high < 0.0 and result.equivalent_within is None)
    if result.verdict in ("worse", "cannot_tell", "better"):
        assert (result.verdict == "worse") == (result.p_adjusted <= ALPHA)
    if result.equivalent_within is not None:
        assert max(-interval.low, interval.high) < result.equivalent_within


def test_the_loss_of_one_run_each_has_a_seed_spread() -> None:
    """A loss that is 0.3 % higher was 'worse (p = 3e-9)' beside 'cannot tell' for the training loss."""
    chance = np.random.default_rng(0)
    items = chance.normal(3.0, 0.5, 500)
    run = RunScore(items * 1.003 + chance.normal(0.0, 0.002, 500))
    result = compared(mean([run], [RunScore(items)]))
    assert result.verdict == "cannot_tell" and result.seed_spread is not None
    assert result.seed_spread["source"] == "public"
    assert result.seed_spread["value"] == pytest.approx(0.0011 * 3.0, rel=0.02)
    assert "the seed spread of public runs is used" in result.explanation
    assert compared(mean([RunScore(items * 1.02)], [RunScore(items)])).verdict == "worse"


def test_the_seeds_of_other_groups_narrow_a_borrowed_spread() -> None:
    chance = np.random.default_rng(0)
    items = chance.normal(3.0, 0.5, 500)
    task = mean([RunScore(items * 1.004 + chance.normal(0.0, 0.002, 500))], [RunScore(items)])
    others = [SeedGroup(score=3.0, excess=0.001**2, freedom=4.0)] * 2
    assert compared(task).verdict == "cannot_tell"
    known = compared(replace(task, groups=others))
    assert known.verdict == "worse" and "the project's other groups" in known.explanation


def test_a_borrowed_spread_names_the_wider_limit() -> None:
    chance = np.random.default_rng(0)
    items = chance.normal(3.0, 0.5, 500)
    result = compared(mean([RunScore(items + chance.normal(0.0, 0.002, 500))], [RunScore(items)]))
    assert result.verdict == "equivalent" and result.margin is not None
    assert result.equivalent_within == pytest.approx(2.0 * result.margin)
    assert "equivalent within ±0.0149" in result.explanation and "own seeds" in result.explanation


def test_a_margin_of_0_counts() -> None:
    base = answers(300, 500)
    assert compared(proportion([flipped(base, 5, 5)], [base], margin=0.0)).verdict == "cannot_tell"
    assert compared(proportion([flipped(base, 5, 5)], [base], margin=0.0)).margin == 0.0


def test_item_ids_that_repeat_are_refused() -> None:
    """As of two filters of one task: half of the scores were dropped without a word."""
    names = [str(i // 2) for i in range(100)]
    result = compared(proportion([answers(60, item_ids=names)], [answers(61, item_ids=names)]))
    assert result.verdict == "cannot_tell"
    assert result.explanation.startswith("50 item ids of 100 repeat an earlier one")


def test_a_heavy_tail_has_no_interval() -> None:
    chance = np.random.default_rng(0)
    items = chance.normal(3.0, 0.5, 500)
    result = compared(mean([RunScore(items + chance.pareto(1.1, 500))], [RunScore(items)]))
    assert result.verdict == "cannot_tell" and result.difference_interval is None
    assert "a few items with values far on the upper side decide the mean" in result.explanation
    assert result.difference is not None and result.difference > 0.0


def test_one_cluster_with_nearly_all_items_has_no_interval() -> None:
    names = np.repeat(["a", "b", "c"], [98, 1, 1]).tolist()
    base = answers(60, clusters=names)
    result = compared(proportion([flipped(base, 0, 30)], [base]))
    assert result.verdict == "cannot_tell" and "one cluster holds 98 % of the items" in result.explanation


def test_a_baseline_seed_far_from_the_others_is_left_out() -> None:
    chance = np.random.default_rng(0)
    items = chance.normal(3.0, 0.5, 500)
    seeds = [RunScore(items * factor, name=f"seed {i}") for i, factor in enumerate((1.0, 1.001, 1.4, 0.999))]
    result = compared(mean([RunScore(items * 1.0005)], seeds))
    assert result.k_baseline == 3 and result.difference == pytest.approx(0.0005 * 3.0, abs=1e-4)
    assert result.warnings == ["Left out, because it is far from the other baseline runs: seed 2."]


def test_each_run_has_its_own_difference() -> None:
    """Of 16 runs one broke down; each showed the difference of the group."""
    chance = np.random.default_rng(0)
    hardness = chance.beta(2.0, 1.0, 1000)

    def seed(harm: float, name: str) -> RunScore:
        return RunScore((chance.random(1000) < hardness - harm).astype(float), name=name)

    arm = [seed(0.4 if i == 7 else 0.0, f"fp8 {i}") for i in range(16)]
    result = compared(proportion(arm, [seed(0.0, f"bf16 {i}") for i in range(3)]))
    assert [each.name for each in result.own if each.left] == ["fp8 7"]
    assert (result.own[7].difference or 0.0) < -0.3 and abs(result.own[0].difference or 1.0) < 0.05
    assert result.own[7].from_group < -0.3
    assert np.mean([each.difference or 0.0 for each in result.own]) == pytest.approx(result.difference)
    alone = compared(proportion([arm[0]], [seed(0.0, "bf16")]))
    assert [each.difference for each in alone.own] == [alone.difference]


def test_20_checkpoints_of_healthy_runs_are_rarely_called_worse_or_better() -> None:
    """Each checkpoint was tested at 5 %: one of 20 was 'worse' in 63 % of runs."""
    chance = np.random.default_rng(3)
    steps = list(range(100, 2100, 100))
    wrong, trials = 0, 60
    for _ in range(trials):
        chances = chance.beta(1.0, 0.7, 300)
        wrong += any(
            judge(
                [
                    proportion(
                        [RunScore((chance.random(300) < chances).astype(float))],
                        [RunScore((chance.random(300) < chances).astype(float))],
                    )
                ],
                alpha=ALPHA,
                checkpoint=number,
                alpha_share=part,
            )[0].verdict
            in ("worse", "better")
            for number, part in enumerate(shares(steps, 2000, ended=False), start=1)
        )
    assert wrong / trials <= ALPHA + 5 * math.sqrt(ALPHA * (1 - ALPHA) / trials)


@pytest.mark.parametrize(("higher", "verdict"), [(True, "better"), (False, "worse")])
def test_better_and_worse_follow_the_metric(higher: bool, verdict: str) -> None:
    base = answers(300, 500)
    task = proportion([flipped(base, 30, 0)], [base], higher_is_better=higher)
    assert compared(task).verdict == verdict


def test_a_margin_of_the_evaluation_replaces_the_default() -> None:
    base = answers(300, 500)
    task = proportion([flipped(base, 5, 5)], [base], margin=0.05)
    assert compared(task).verdict == "equivalent" and compared(task).margin == 0.05


def test_the_margin_of_a_loss_is_that_of_the_project() -> None:
    items = np.random.default_rng(0).normal(2.0, 0.5, 400)
    task = mean([RunScore(items * 1.001)], [RunScore(items)])
    result = compare_scores(task, alpha=ALPHA, loss_margin=0.0025)
    assert result.verdict == "equivalent" and result.margin == pytest.approx(0.0025 * items.mean())
    assert compare_scores(task, alpha=ALPHA, loss_margin=0.0005).verdict == "cannot_tell"


def test_items_are_paired_by_name_in_any_order() -> None:
    names = [str(i) for i in range(100)]
    baseline = answers(60, item_ids=names)
    shuffled = np.random.default_rng(0).permutation(100)
    run = RunScore(baseline.items[shuffled], item_ids=[names[i] for i in shuffled])
    result = compared(proportion([run], [baseline]))
    assert "paired" in result.method and result.difference == 0.0
    assert result.difference_interval is not None and result.difference_interval.high < 0.03


def test_items_without_a_partner_are_left_out_of_the_pairs() -> None:
    baseline = answers(60, item_ids=[str(i) for i in range(100)])
    run = answers(60, item_ids=[str(i) for i in range(50, 150)])
    # Items 50 to 99 are common: all are right in the run, ten of fifty in the baseline.
    assert compared(proportion([run], [baseline])).difference == pytest.approx(0.8)
    strangers = answers(60, item_ids=[f"other {i}" for i in range(100)])
    lost = compared(proportion([strangers], [baseline]))
    assert lost.verdict == "cannot_tell" and "in common" in lost.explanation


def test_other_items_are_compared_without_pairs() -> None:
    result = compared(proportion([answers(60)], [answers(90, 150)]))
    assert "other items" in result.method and result.difference == pytest.approx(0.0)


def test_three_equal_scores_do_not_give_a_band_of_zero_width() -> None:
    """Their standard deviation is 1e-17 by rounding; the old band excluded every other score."""
    items = np.array([0.1, 0.2, 0.4] * 30)
    seeds = [RunScore(np.random.default_rng(seed).permutation(items)) for seed in range(3)]
    band, _ = baseline_interval(seeds, ALPHA, proportion=False)
    assert band.high - band.low > 0.03
    result = compared(mean([RunScore(items + 1e-4)], seeds))
    assert result.inside is True


def test_bands_stay_within_zero_and_one() -> None:
    seeds = [answers(96), answers(99), answers(90)]
    result = compared(proportion([answers(97)], seeds))
    assert result.baseline_interval is not None and result.baseline_interval.high == 1.0
    names = [str(i // 25) for i in range(100)]
    clustered, _ = item_interval(answers(98, clusters=names), ALPHA, proportion=True)
    assert clustered.high == 1.0 and clustered.low > 0.0


def test_clusters_widen_the_interval_of_the_difference() -> None:
    names = [str(i // 10) for i in range(500)]
    base = answers(300, 500, clusters=names)
    plain = compared(proportion([flipped(answers(300, 500), 0, 20)], [answers(300, 500)]))
    clustered = compared(proportion([flipped(base, 0, 20)], [base]))
    assert plain.difference_interval is not None and clustered.difference_interval is not None
    assert np.ptp(clustered.difference_interval) > 2 * np.ptp(plain.difference_interval)


def test_the_spread_between_seeds_counts() -> None:
    """Seeds whose scores differ by points make a loss of two points unremarkable."""
    chance = np.random.default_rng(1)
    seeds = [RunScore((chance.random(2000) < share).astype(float)) for share in (0.55, 0.60, 0.65)]
    run = RunScore((chance.random(2000) < 0.58).astype(float))
    result = compared(proportion([run], seeds))
    assert result.verdict == "cannot_tell" and result.seed_spread is not None
    assert result.seed_spread["source"] == "own" and result.seed_spread["value"] > 0.03
    alone = compared(proportion([run], [seeds[1]]))
    assert alone.difference_interval is not None and result.difference_interval is not None
    assert np.ptp(result.difference_interval) > 2 * np.ptp(alone.difference_interval)


def test_without_own_seeds_the_public_spread_of_the_benchmark_is_used() -> None:
    base = answers(300, 500)
    known = compared(proportion([flipped(base, 0, 10)], [base], name="AGIEval"))
    unknown = compared(proportion([flipped(base, 0, 10)], [base], name="ours"))
    assert (unknown.verdict, known.verdict) == ("worse", "cannot_tell")
    assert "public seed spread of AGIEval is used: ±1.63 percentage points" in known.explanation
    assert "Madaan et al. 2024" in known.explanation
    assert "the seed spread of public runs is used: ±0.29 percentage points" in unknown.explanation


def test_other_runs_of_the_seed_group_take_part() -> None:
    chance = np.random.default_rng(0)
    chances = chance.beta(0.5, 0.3, 1000)

    def seed(harm: float = 0.0) -> RunScore:
        return RunScore((chance.random(1000) < chances - harm).astype(float))

    result = compared(proportion([seed() for _ in range(4)], [seed() for _ in range(4)]))
    assert result.k_run == 4 and "mean of 4 runs" in result.explanation
    assert result.smallest_detectable is not None and result.smallest_detectable < 0.03


@pytest.mark.parametrize("higher", [True, False])
def test_a_score_that_is_not_finite_is_worse(higher: bool) -> None:
    run = RunScore(np.array([math.nan, 1.0, math.inf]))
    result = compared(mean([run], [answers(60)], higher_is_better=higher))
    assert result.verdict == "worse" and result.explanation.startswith("2 of 3 items")


def test_a_score_without_a_baseline_has_an_interval() -> None:
    result = compared(proportion([answers(60)], []))
    assert result.verdict == "cannot_tell" and result.interval is not None
    broken = RunScore(np.array([math.nan, 1.0]))
    assert compared(proportion([answers(60)], [broken])).verdict == "cannot_tell"


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_many_tasks_are_adjusted_for_their_number() -> None:
    base = answers(300, 500)
    suspect = proportion([flipped(base, 0, 11)], [base])
    others = [proportion([flipped(base, 8, 8)], [base], name=f"task {i}") for i in range(9)]
    assert compared(suspect).verdict == "worse"
    results = judge([suspect, *others], alpha=ALPHA)
    assert results[0].verdict == "cannot_tell" and results[0].tasks == 10
    assert results[0].p_adjusted == pytest.approx(20 * (results[0].p_value or 0.0))
    assert "adjusted for 10 tasks" in results[0].explanation


def test_no_harm_is_rarely_called_worse_over_ten_tasks() -> None:
    """Three seeds against three; the family-wise error is at most alpha, here within five standard errors."""
    chance = np.random.default_rng(7)
    wrong, trials = 0, 40
    for _ in range(trials):
        chances = chance.beta(0.3, 0.2, (10, 300))
        tasks = [
            proportion(
                [RunScore((chance.random(300) < row).astype(float)) for _ in range(3)],
                [RunScore((chance.random(300) < row).astype(float)) for _ in range(3)],
                name=str(index),
            )
            for index, row in enumerate(chances)
        ]
        wrong += any(result.verdict == "worse" for result in judge(tasks, alpha=ALPHA))
    assert wrong / trials <= ALPHA + 5 * math.sqrt(ALPHA * (1 - ALPHA) / trials)


@pytest.mark.parametrize(
    ("verdicts", "overall", "words"),
    [
        (["equivalent", "equivalent"], "equivalent", "Equivalent to BF16 on all 2 tasks."),
        (["equivalent", "better"], "better", "better on 1, equivalent on 1"),
        (["equivalent", "worse"], "worse", "Worse than BF16 on 1 of 2 tasks: task 1."),
        (["equivalent", "cannot_tell"], "cannot_tell", "Cannot tell yet for 1 of 2 tasks"),
        (["cannot_tell"], "cannot_tell", "Cannot tell yet for the one task: no harm has been found"),
        ([], "cannot_tell", "No task has been compared"),
    ],
)
def test_summarises_the_tasks(verdicts: list[str], overall: str, words: str) -> None:
    summary = summarise([(f"task {i}", verdict) for i, verdict in enumerate(verdicts)], ALPHA)
    assert summary.verdict == overall and words in summary.explanation
    if verdicts and overall != "better":
        assert "at most 5 %" in summary.explanation


@given(
    st.lists(st.lists(st.floats(allow_nan=True, width=32), max_size=5), min_size=1, max_size=4), st.booleans()
)
def test_any_input_gives_strict_json(items: list[list[float]], higher: bool) -> None:
    run, *baselines = (RunScore(np.array(values, dtype=np.float64)) for values in items)
    result = compared(mean([run], baselines, higher_is_better=higher))
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["explanation"]
