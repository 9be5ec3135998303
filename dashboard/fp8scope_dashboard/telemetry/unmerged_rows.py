"""Query the exact rows of many tensors, each of one rank: scales and amaxes of several ranks do not mix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.rank_merge import Merged, across_ranks
from fp8scope_dashboard.telemetry.writers import step_range

# Ranks that are searched for a tensor, the lowest first: the stages of a pipeline have different tensors.
MAX_RANKS: Final = 8


def unmerged_rows(
    run_id: UUID, statistics: Sequence[str], tensors: Sequence[int], first: int, last: int
) -> Merged | None:
    """Stored statistics of some tensors in the steps first..last: float64[T, N] by name, NaN if not observed.

    Each tensor has the rows of the lowest rank that observes it. None if there are no rows. The caller bounds
    tensors times steps.
    """
    if step_range(run_id) is None or not len(tensors):
        return None
    parts = rows.tensor_parts(run_id, statistics, np.array(tensors), (first, last), timed=False)
    chosen: Merged | None = None
    for number, (_, of_rank) in enumerate(groupby(parts, key=attrgetter("rank"))):
        if number == MAX_RANKS or (chosen is not None and _observed(chosen).all()):
            break
        merged = across_ranks(list(of_rank))
        if merged is not None:
            chosen = merged if chosen is None else _completed(chosen, merged)
    return chosen


def _observed(rows: Merged) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which tensors have any value."""
    seen = np.stack([~np.isnan(values).all(axis=1) for values in rows.values.values()])
    return np.asarray(seen.any(axis=0), dtype=np.bool_)


def _completed(rows: Merged, others: Merged) -> Merged:
    """Add the tensors that only `others` observes, at the steps of `rows`."""
    missing = ~_observed(rows)
    _, here, there = np.intersect1d(rows.steps, others.steps, return_indices=True)
    values = {}
    for name, array in rows.values.items():
        filled = array.copy()
        filled[np.ix_(missing, here)] = others.values[name][np.ix_(missing, there)]
        values[name] = filled
    return Merged(rows.steps, rows.times, values)
