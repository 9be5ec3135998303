"""The tensors of a run that have changed lately, compared with their own past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.analysis.false_discovery import (
    LEVEL,
    MIN_PAST,
    MIN_RECENT,
    benjamini_hochberg,
    change_p_values,
    e_benjamini_hochberg,
    e_values_of,
)
from fp8scope_dashboard.telemetry import queries

# The steps that are compared: the last quarter with the three before it, in columns of neighbouring steps.
MAX_STEPS: Final = 1_000
MAX_COLUMNS: Final = 240
RECENT: Final = 0.25


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor that has changed. `before` and `since` are the medians of the statistic."""

    index: int
    name: str
    p_value: float
    before: float
    since: float

    @property
    def rises(self) -> bool:
        return self.since > self.before


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The result for one statistic.

    Attributes:
        step: the first step of the recent part.
        tested: the number of tensors with enough values.
        changed: the claims, smallest p-value first; among all claims the expected share of false ones is at
            most `level`.
        certain: how many of them hold however the tensors depend on each other.
    """

    statistic: str
    step: int
    tested: int
    changed: list[ChangedTensor]
    certain: int
    level: float = LEVEL


def changed_tensors(run_id: UUID, statistic: str) -> Changes | None:
    """Compare the last steps of every tensor with those before; None with too few steps."""
    stored = queries.step_range(run_id)
    if stored is None:
        return None
    last = stored[1]
    first = max(stored[0], last - MAX_STEPS + 1)
    columns = min(MAX_COLUMNS, last - first + 1)
    split = columns - int(RECENT * columns)
    if split < MIN_PAST or columns - split < MIN_RECENT:
        return None
    heatmap = queries.heatmap(run_id, statistic, first=first, last=last, columns=columns)
    values = heatmap.values
    p_values = change_p_values(values, split)
    claims = np.flatnonzero(benjamini_hochberg(p_values))
    certain = e_benjamini_hochberg(e_values_of(p_values))
    changed = [
        ChangedTensor(
            heatmap.indices[i],
            heatmap.names[i],
            float(p_values[i]),
            float(np.nanmedian(values[i, :split])),
            float(np.nanmedian(values[i, split:])),
        )
        for i in claims[np.argsort(p_values[claims], kind="stable")].tolist()
    ]
    tested = int(np.count_nonzero(~np.isnan(p_values)))
    return Changes(
        statistic=statistic,
        step=int(heatmap.step_edges[split]),
        tested=tested,
        changed=changed,
        certain=int(certain.sum()),
    )
