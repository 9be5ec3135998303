"""Shares of the error probability for the checkpoints of a run, so that any number may be looked at.

Alpha spending (Lan and DeMets, 1983): each checkpoint is tested at its share of alpha, and the shares sum to
at most 1 for any number of checkpoints. By Bonferroni a wrong verdict at any of them has probability alpha at
most, however the checkpoints depend on each other. The end of a run, which people decide by, gets half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# What the checkpoints before the last share.
BEFORE_THE_END: Final = 0.5
# A last checkpoint this close to the planned end is the end.
END: Final = 0.99


def shares(steps: Sequence[int], planned: int | None, *, ended: bool) -> list[float]:
    """The share of alpha of each checkpoint.

    Args:
        steps: of the checkpoints, increasing.
        planned: steps of the run; None if they are not known.
        ended: the run logs no further checkpoint.
    """
    spent, before = [], 0.0
    for number, step in enumerate(steps, start=1):
        after = _spent_until(number, step, planned)
        spent.append(max(0.0, after - before))
        before = max(before, after)
    if steps and (ended or (planned is not None and steps[-1] >= END * planned)):
        spent[-1] = 1.0 - sum(spent[:-1])
    return spent


def _spent_until(number: int, step: int, planned: int | None) -> float:
    """The share that is spent when this checkpoint has been looked at: linear in the share of the plan.

    Without a plan 1 - 1/(k + 1) of what the checkpoints before the end share, with k their number.
    """
    if planned:
        return BEFORE_THE_END * min(1.0, step / planned)
    return BEFORE_THE_END * (1.0 - 1.0 / (number + 1.0))
