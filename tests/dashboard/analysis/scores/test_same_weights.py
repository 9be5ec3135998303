"""Verdicts on one checkpoint in two precisions: paired items, without a spread between seeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8scope_dashboard.analysis.scores.result import RunScore, TaskScores
from fp8scope_dashboard.analysis.scores.verdict import compare_scores, judge

ITEMS = 2_000


def task(shift: float, seed: int = 0, items: int = ITEMS, name: str = "texts") -> TaskScores:
    """Losses of texts, of which each changes by `shift` and a little noise."""
    generator = np.random.default_rng(seed)
    losses = generator.gamma(4.0, 0.5, items)
    changed = losses + shift + generator.normal(0.0, 0.02, items)
    return TaskScores(
        name=name,
        metric="nll",
        kind="mean",
        higher_is_better=False,
        arm=[RunScore(changed)],
        baselines=[RunScore(losses)],
        margin=0.005,
        same_weights=True,
    )


def test_it_works() -> None:
    worse = compare_scores(task(0.02), alpha=0.05)
    assert worse.verdict == "worse" and "seed" not in worse.explanation
    assert compare_scores(task(-0.02), alpha=0.05).verdict == "better"
    equivalent = compare_scores(task(0.0), alpha=0.05)
    assert equivalent.verdict == "equivalent" and equivalent.equivalent_within == 0.005
    unsure = compare_scores(task(0.002, items=30), alpha=0.05)
    assert unsure.verdict == "cannot_tell" and unsure.needs is not None and unsure.needs["seeds"] is None
    assert "seed" not in unsure.explanation


def test_the_interval_is_that_of_the_items_alone() -> None:
    alone = compare_scores(task(0.02), alpha=0.05)
    assert alone.difference_interval is not None
    half = (alone.difference_interval[1] - alone.difference_interval[0]) / 2.0
    assert half < 3.0 * 0.02 / ITEMS**0.5
    # Two runs with the same scores would also differ by their seeds.
    runs = compare_scores(replace(task(0.02), same_weights=False), alpha=0.05)
    assert runs.difference_interval is not None
    assert runs.difference_interval[1] - runs.difference_interval[0] > 4.0 * half


def test_a_benchmark_with_a_public_spread_borrows_none() -> None:
    generator = np.random.default_rng(1)
    right = (generator.random(1_000) < 0.6).astype(float)
    wrong = right.copy()
    wrong[:60] = 0.0
    named = TaskScores(
        name="hellaswag",
        metric="accuracy",
        kind="proportion",
        higher_is_better=True,
        arm=[RunScore(wrong)],
        baselines=[RunScore(right)],
        same_weights=True,
    )
    result = compare_scores(named, alpha=0.05)
    assert result.verdict == "worse" and "McNemar" in result.method
    assert result.seed_spread is not None and result.seed_spread["source"] == "none"


def test_all_cells_share_the_error() -> None:
    """Without a difference, the chance that any cell is called worse or better is at most alpha."""
    wrong = 0
    for seed in range(60):
        family = [
            replace(task(0.0, seed=100 * seed + cell, items=60), margin=1e-9, name=str(cell))
            for cell in range(8)
        ]
        results = judge(family, alpha=0.1)
        wrong += any(result.verdict in ("worse", "better") for result in results)
    # 6 are expected at most; more than 13 have a probability below 0.3 %.
    assert wrong <= 13
