"""The items that several runs have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fp8scope_dashboard.analysis.scores.result import ITEMS, RunScore
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.numbers import count


def aligned(scores: Sequence[RunScore]) -> tuple[Floats, Sequence[str] | None] | None:
    """Items float64[K, n] that all scores have, and their clusters; None if they cannot be paired.

    Pairs by name. Without names, by position if all have the same number of items: any fixed pairing gives a
    valid error, and the right order a smaller one.

    Raises:
        ValueError: if names are given, but one of them repeats, or fewer than two are in common.
    """
    if all(score.item_ids is not None for score in scores):
        for score in scores:
            _check_ids(score.item_ids or ())
        positions = [{name: i for i, name in enumerate(score.item_ids or ())} for score in scores]
        common = [name for name in positions[0] if all(name in position for position in positions[1:])]
        if len(common) < ITEMS:
            raise ValueError("The run and its baseline have fewer than two evaluation items in common.")
        items = np.stack(
            [score.items[[at[name] for name in common]] for score, at in zip(scores, positions, strict=True)]
        )
        return items, _clusters_of(scores, positions, common)
    if len({len(score.items) for score in scores}) > 1:
        return None
    clusters = next((score.clusters for score in scores if score.clusters is not None), None)
    return np.stack([score.items for score in scores]), clusters


def _check_ids(names: Sequence[str]) -> None:
    """Raise ValueError if names of items repeat: it is not known then which ones are pairs."""
    repeated = len(names) - len(set(names))
    if repeated:
        raise ValueError(
            f"{count(repeated, 'item id')} of {len(names):,} "
            f"{'repeats' if repeated == 1 else 'repeat'} an earlier one, so items cannot be paired. Give "
            "each item its own id, and each filter of a task an evaluation of its own."
        )


def _clusters_of(
    scores: Sequence[RunScore], positions: Sequence[Mapping[str, int]], names: Sequence[str]
) -> Sequence[str] | None:
    """The clusters of the named items, from the first score that has clusters."""
    for score, at in zip(scores, positions, strict=True):
        if score.clusters is not None:
            return [score.clusters[at[name]] for name in names]
    return None
