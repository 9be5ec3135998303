"""A run's writers as readers of its telemetry see them: whom to believe, and up to where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import TENSOR, Int64s

EVERY_STEP = 2**63 - 1
Interval = tuple[int, int]
"""First and last step, both inclusive."""


@dataclass(frozen=True)
class Source:
    """One writer.

    Attributes:
        order: as in merge.Part.
        attempt: of the writers' attempts, which one.
        until: its rows of this step and later do not count: a later attempt has written from there on.
        catalogue: int64[n], the Tensor.index of each of the writer's tensor columns.
    """

    uuid: UUID
    rank: int
    order: int
    attempt: int
    until: int
    catalogue: Int64s


@dataclass(frozen=True)
class Stored:
    """What is to be known of a run's telemetry before any of it is read.

    Attributes:
        sources: the run's writers, the most authoritative first: lowest rank, then latest attempt, then the
            newest.
        steps: the first and the last stored step that counts; None when nothing is stored.
        tensors_from: of tensors in the steps before, retention has left only the roll-ups.
    """

    sources: dict[UUID, Source]
    steps: Interval | None
    tensors_from: int

    def raw_from(self, column: str) -> int:
        """From which step on a column's rows are there, by its name on the wire."""
        return self.tensors_from if column.startswith(TENSOR) else 0


def stored_of(run_id: UUID) -> Stored:
    """All of it as of one moment."""
    rows = sql.fetch(
        """
        SELECT uuid, rank, attempt, first_step, last_step, catalogue, raw_from
        FROM runs_writer w LEFT JOIN telemetry_rolling r ON r.run_id = w.run_id
        WHERE w.run_id = %(run)s
        ORDER BY rank, attempt DESC, created_at DESC, uuid
        """,
        {"run": run_id},
    )
    cuts = cutoffs((attempt, first) for _, _, attempt, first, _, _, _ in rows)
    found = {
        uuid: Source(
            uuid, rank, order, attempt, cuts.get(attempt, EVERY_STEP), np.asarray(catalogue, np.int64)
        )
        for order, (uuid, rank, attempt, _, _, catalogue, _) in enumerate(rows)
    }
    steps = _range([(attempt, first, last) for _, _, attempt, first, last, _, _ in rows], cuts)
    return Stored(found, steps, (rows[0][6] if rows else None) or 0)


def sources_of(run_id: UUID) -> dict[UUID, Source]:
    """`Stored.sources` of the run."""
    return stored_of(run_id).sources


def cutoffs_of(run_id: UUID) -> dict[int, int]:
    """`cutoffs` of the run's writers."""
    rows = sql.fetch("SELECT attempt, first_step FROM runs_writer WHERE run_id = %(run)s", {"run": run_id})
    return cutoffs((attempt, first) for attempt, first in rows)


def cutoffs(writers: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """By attempt, the first step that any later one has stored; only for attempts that have a later one.

    Of each writer: its attempt, and the first step that it has stored (None before it has).
    """
    firsts: dict[int, int] = {}
    attempts = set()
    for attempt, first in writers:
        attempts.add(attempt)
        if first is not None:
            firsts[attempt] = min(first, firsts.get(attempt, first))
    found = {}
    for attempt in attempts:
        later = [first for other, first in firsts.items() if other > attempt]
        if later:
            found[attempt] = min(later)
    return found


def step_range(run_id: UUID) -> tuple[int, int] | None:
    """The run's first and last stored step; None when nothing is stored.

    What a later attempt has replaced counts no more.
    """
    rows = sql.fetch(
        "SELECT attempt, first_step, last_step FROM runs_writer WHERE run_id = %(run)s", {"run": run_id}
    )
    return _range(rows, cutoffs((attempt, first) for attempt, first, _ in rows))


def _range(
    writers: Iterable[tuple[int, int | None, int | None]], cuts: dict[int, int]
) -> tuple[int, int] | None:
    """Of each writer: its attempt, and the first and last step that it has stored."""
    known = [
        (attempt, first, last) for attempt, first, last in writers if first is not None and last is not None
    ]
    if not known:
        return None
    begin = min(first for _, first, _ in known)
    return begin, max(begin, *(min(last, cuts.get(attempt, last + 1) - 1) for attempt, _, last in known))
