"""The verdict on a score: inside, above or below the interval of the baseline."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.analysis.scores import Score, compare_scores

ALPHA = 0.05


def answers(right: int, n: int = 100, **fields: list[str]) -> Score:
    return Score(np.repeat([1.0, 0.0], [right, n - right]), **fields)


def test_it_works() -> None:
    result = compare_scores(answers(60), [answers(62)], proportion=True, alpha=ALPHA)
    assert result.verdict == "inside" and result.n == 100 and result.k_baseline == 1
    assert result.score == 0.6 and result.baseline_score == 0.62
    assert result.explanation.startswith("The score 0.6 is inside the interval from one baseline run's items")


@pytest.mark.parametrize(("right", "verdict"), [(30, "below"), (60, "inside"), (90, "above")])
def test_compares_with_one_baseline_run(right: int, verdict: str) -> None:
    assert compare_scores(answers(right), [answers(60)], proportion=True, alpha=ALPHA).verdict == verdict


@pytest.mark.parametrize(("right", "verdict"), [(50, "below"), (61, "inside"), (75, "above")])
def test_compares_with_several_baseline_seeds(right: int, verdict: str) -> None:
    baselines = [answers(60), answers(61), answers(63)]
    result = compare_scores(answers(right), baselines, proportion=True, alpha=ALPHA)
    assert result.verdict == verdict and "seeds" in result.method
    assert result.p_value is not None and (result.p_value < ALPHA) == (verdict != "inside")


def test_a_seed_of_the_same_configuration_is_inside_at_the_stated_level() -> None:
    chance = np.random.default_rng(0)
    trials, inside = 1000, 0
    for _ in range(trials):
        means = chance.normal(2.0, 0.05, 4)
        scores = [Score(mean + np.array([-1.0, 1.0])) for mean in means]
        inside += compare_scores(scores[0], scores[1:], proportion=False, alpha=ALPHA).verdict == "inside"
    assert abs(inside / trials - 0.95) < 5 * math.sqrt(0.95 * 0.05 / trials)


def test_items_are_paired_by_name_in_any_order() -> None:
    names = [str(i) for i in range(100)]
    baseline = answers(60, item_ids=names)
    shuffled = np.random.default_rng(0).permutation(100)
    run = Score(baseline.items[shuffled], item_ids=[names[i] for i in shuffled])
    result = compare_scores(run, [baseline], proportion=True, alpha=ALPHA)
    assert "paired" in result.method and result.p_value == 1.0
    assert result.difference_interval == (0.0, 0.0)


def test_items_without_a_partner_are_left_out_of_the_pairs() -> None:
    baseline = answers(60, item_ids=[str(i) for i in range(100)])
    run = answers(60, item_ids=[str(i) for i in range(50, 150)])
    result = compare_scores(run, [baseline], proportion=True, alpha=ALPHA)
    # Items 50 to 99 are common: all are right in the run, ten of fifty in the baseline.
    assert result.difference == pytest.approx(0.8)
    strangers = answers(60, item_ids=[f"other {i}" for i in range(100)])
    lost = compare_scores(strangers, [baseline], proportion=True, alpha=ALPHA)
    assert lost.verdict == "insufficient" and "in common" in lost.explanation


def test_seeds_with_equal_scores_use_the_interval_over_items() -> None:
    result = compare_scores(answers(60), [answers(61), answers(61)], proportion=True, alpha=ALPHA)
    assert result.verdict == "inside" and "Wilson" in result.method


def test_exact_intervals_on_request() -> None:
    result = compare_scores(answers(60), [answers(61)], proportion=True, alpha=ALPHA, exact=True)
    assert "Clopper-Pearson" in result.method


def test_clusters_widen_the_interval() -> None:
    clusters = [str(i // 10) for i in range(100)]
    plain = compare_scores(answers(60), [answers(60)], proportion=True, alpha=ALPHA)
    clustered = compare_scores(
        answers(60, clusters=clusters), [answers(60, clusters=clusters)], proportion=True, alpha=ALPHA
    )
    assert plain.baseline_interval is not None and clustered.baseline_interval is not None
    assert np.diff(clustered.baseline_interval) > 2 * np.diff(plain.baseline_interval)


@pytest.mark.parametrize(("higher_is_better", "verdict"), [(True, "below"), (False, "above")])
def test_a_score_that_is_not_finite_is_on_the_worse_side(higher_is_better: bool, verdict: str) -> None:
    run = Score(np.array([math.nan, 1.0, math.inf]))
    result = compare_scores(
        run, [answers(60)], proportion=False, alpha=ALPHA, higher_is_better=higher_is_better
    )
    assert result.verdict == verdict and result.explanation.startswith("2 of 3 items")


def test_a_score_without_a_baseline_has_an_interval() -> None:
    result = compare_scores(answers(60), [], proportion=True, alpha=ALPHA)
    assert result.verdict == "insufficient" and result.interval is not None
    broken = Score(np.array([math.nan, 1.0]))
    assert compare_scores(answers(60), [broken], proportion=True, alpha=ALPHA).verdict == "insufficient"


@given(
    st.lists(st.lists(st.floats(allow_nan=True, width=32), max_size=5), min_size=1, max_size=4), st.booleans()
)
def test_any_input_gives_strict_json(items: list[list[float]], higher: bool) -> None:
    run, *baselines = (Score(np.array(values, dtype=np.float64)) for values in items)
    result = compare_scores(run, baselines, proportion=False, alpha=ALPHA, higher_is_better=higher)
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["explanation"]
