"""The step at which each tensor of a run leaves its range: read from the store, by `tensor_onsets`.

The ranking of tensors, and the alert of an amax that grows, name what this finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.tensor_onsets import Ranked, over_limit, ranked
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.text.onsets import steps_in_words

Int64s = NDArray[np.int64]

# Columns of a whole run, in which onsets are searched first.
COLUMNS: Final = 400
# Onsets in this many of the earliest columns are searched step by step, over at most this many cells (steps x
# tensors) each.
EXACT_COLUMNS: Final = 4
MAX_CELLS: Final = 2_000_000
# The key of an entry in the evidence of an alert whose onset was searched here: [statistic, limit].
RANKED: Final = "ranked_by"


@dataclass(frozen=True)
class TensorOnset:
    """The first step over the limit, and the last one before it that was looked at; see `text.onsets`.

    Where a step is not searched, they are the last step of its column and the last one before the column.
    """

    step: int
    after: int | None

    @property
    def earliest(self) -> int:
        """The first step at which it may have begun."""
        return self.step if self.after is None or self.after < 0 else min(self.after + 1, self.step)

    @property
    def in_words(self) -> str:
        """The step, or the steps between which it lies."""
        return steps_in_words(self.step, self.after)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Tensors of a run over its columns.

    Attributes:
        indices: Tensor.index of T tensors.
        edges: int64[C + 1]; column c holds the steps edges[c] <= step < edges[c + 1].
        values: float64[T, C], the largest value of each column; NaN if it was not observed.
        left_out: first steps of the run that do not count, because scales are not settled.
    """

    run_id: UUID
    statistic: str
    indices: Sequence[int]
    edges: Int64s
    values: Floats
    left_out: int = 0

    @property
    def settled_from(self) -> int:
        """The first step that counts."""
        return int(self.edges[0]) + self.left_out

    def rows(self, positions: Sequence[int], first: int, last: int) -> tuple[Int64s, Floats]:
        """Steps, int64[N], and values, float64[len(positions), N], step by step.

        Where retention has left only roll-ups, the steps of a bucket are one, the last of them.
        """
        tensors = [self.indices[position] for position in positions]
        finer = queries.heatmap(
            self.run_id, self.statistic, tensors=tensors, first=first, last=last, columns=last - first + 1
        )
        by_index = {index: row for row, index in enumerate(finer.indices)}
        values = np.full((len(positions), finer.values.shape[1]), np.nan)
        for i, tensor in enumerate(tensors):
            if tensor in by_index:
                values[i] = finer.values[by_index[tensor]]
        return finer.step_edges[1:] - 1, values


@dataclass(frozen=True)
class FirstOnsets:
    """The values that tensors are ranked by, and the onset of each position that has one."""

    facts: Ranked
    onsets: Mapping[int, TensorOnset]


def first_onsets(columns: Columns, limit: float, recent: int = 1) -> FirstOnsets:
    """The first sustained onset of each tensor, exact for the earliest ones.

    Args:
        limit: see `tensor_onsets.default_limit`.
        recent: the number of last columns that are `Ranked.now`.
    """
    facts = ranked(columns.values, columns.statistic, limit, recent, counted=_settled(columns))
    onsets: dict[int, TensorOnset] = {}
    edges = columns.edges
    for number, column in enumerate(np.unique(facts.onset[facts.onset >= 0]).tolist()):
        positions = np.flatnonzero(facts.onset == column).tolist()
        exact = _exact(columns, facts, limit, column, positions) if number < EXACT_COLUMNS else {}
        whole = TensorOnset(int(edges[column + 1]) - 1, int(edges[column]) - 1)
        onsets |= {position: exact.get(position, whole) for position in positions}
    return FirstOnsets(facts, onsets)


def told_onsets(run: Run, statistic: str, limit: float) -> dict[str, TensorOnset]:
    """By name, the onsets that an alert of the run has told, by the same statistic and limit.

    Rows that arrive later move the median of a tensor's beginning, and so its onset, by some steps.
    """
    told: dict[str, TensorOnset] = {}
    # The events of the alerts' app, which is above this one.
    for evidence in run.alerts.filter(evidence__first__has_key=RANKED).values_list("evidence", flat=True):
        for entry in (evidence["first"], *evidence.get("tensors", [])):
            if entry.get(RANKED) == [statistic, limit]:
                onset = TensorOnset(int(entry["onset_step"]), int(entry["after_step"]))
                told[entry["name"]] = min(
                    told.get(entry["name"], onset), onset, key=lambda told_onset: told_onset.step
                )
    return told


def _settled(columns: Columns) -> Floats:
    """The values of the columns without the steps that are left out, float64[T, C]."""
    edges, values, begin = columns.edges, columns.values, columns.settled_from
    if not columns.left_out or not values.shape[1]:
        return values
    settled = values.copy()
    settled[:, edges[:-1] < begin] = np.nan
    across = int(np.searchsorted(edges, begin, side="right")) - 1
    # Of the column that holds the first settled step, the steps from there on.
    if across < values.shape[1] and edges[across] < begin:
        every = range(len(columns.indices))
        _, rows = columns.rows(every, begin, int(edges[across + 1]) - 1)
        settled[:, across] = np.fmax.reduce(rows, axis=1, initial=np.nan)
    return settled


def _exact(
    columns: Columns, facts: Ranked, limit: float, column: int, positions: Sequence[int]
) -> dict[int, TensorOnset]:
    """The onsets of some positions in one column, from its rows and those of what was observed before it."""
    edges = columns.edges
    begin, last = max(int(edges[column]), columns.settled_from), int(edges[column + 1]) - 1
    chosen = list(positions)[: max(1, MAX_CELLS // (last - begin + 1))]
    # Of a tensor that is observed now and then, the last observation lies columns before.
    earlier = ~np.isnan(columns.values[chosen, :column])
    before = [int(edges[np.flatnonzero(row)[-1]]) if row.any() else None for row in earlier]
    reach = min((step for step in before if step is not None), default=begin)
    first = max(min(reach, begin), min(begin, last - MAX_CELLS // len(chosen) + 1))
    if min(first, int(edges[column])) < columns.settled_from:
        first = int(edges[0])
    steps, rows = columns.rows(chosen, first, last)
    over = over_limit(rows, facts.before[chosen], columns.statistic, limit)
    over[:, steps < begin] = False
    exact: dict[int, TensorOnset] = {}
    for i, position in enumerate(chosen):
        hits = np.flatnonzero(over[i])
        # A bucket of several steps is no step.
        if len(hits) and int(steps[hits[0]]) - (int(steps[hits[0] - 1]) if hits[0] else first - 1) == 1:
            step = int(steps[hits[0]])
            seen = steps[: hits[0]][~np.isnan(rows[i, : hits[0]])]
            exact[position] = TensorOnset(step, _after(step, seen, before[i], columns.settled_from))
    return exact


def _after(step: int, seen: Int64s, before: int | None, settled_from: int) -> int:
    """The last step before an onset that was looked at.

    Args:
        seen: the observations before it that were read.
        before: the first step of the last column before with an observation; None without one.
    """
    settled = seen[seen >= settled_from]
    if len(settled):
        return int(settled[-1])
    # What was observed before it counts was over the limit from its first observation on, perhaps.
    if len(seen):
        return int(seen[0]) - 1
    return step - 1 if before is None else min(before, step - 1)
