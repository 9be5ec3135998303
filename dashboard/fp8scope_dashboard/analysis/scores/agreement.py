"""On how many items two runs agree: the pairs behind a paired difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp8scope_dashboard.analysis.scores.result import RunScore
from fp8scope_dashboard.text.numbers import usable


@dataclass(frozen=True)
class Agreement:
    """Items of two runs, in pairs.

    Attributes:
        pairs: items that both runs have, with finite scores.
        higher, lower: items that the first run scores higher or lower than the second; the rest are equal.
        median: the median difference of the items, first minus second.
    """

    pairs: int
    higher: int
    lower: int
    median: float

    @property
    def equal(self) -> int:
        return self.pairs - self.higher - self.lower


def agreement(first: RunScore, second: RunScore) -> Agreement | None:
    """Compare two runs item by item, by name or else by position; None if their items cannot be paired."""
    if first.item_ids is not None and second.item_ids is not None:
        at = {name: index for index, name in enumerate(second.item_ids)}
        places = [(index, at[name]) for index, name in enumerate(first.item_ids) if name in at]
        if not places:
            return None
        mine, other = (np.array(indices) for indices in zip(*places, strict=True))
        a, b = first.items[mine], second.items[other]
    elif len(first.items) == len(second.items):
        a, b = first.items, second.items
    else:
        return None
    both = usable(a) & usable(b)
    if not both.any():
        return None
    difference = a[both] - b[both]
    return Agreement(
        len(difference),
        int(np.count_nonzero(difference > 0)),
        int(np.count_nonzero(difference < 0)),
        float(np.median(difference)),
    )
