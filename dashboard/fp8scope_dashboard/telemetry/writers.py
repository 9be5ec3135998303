"""The writers of a run by authority, and the steps for which each one counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np

from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.telemetry.codec import TENSOR, Int64s

EVERY_STEP = 2**63 - 1
Interval = tuple[int, int]
"""The first and the last step, both inclusive."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A writer as a source of rows.

    Attributes:
        order: position by authority, as in rank_merge.Part.
        attempt: the attempt of the writer.
        until: the first step that a later attempt has replaced; rows from there on do not count.
        catalogue: int64[n], the Tensor.index of each tensor column.
    """

    uuid: UUID
    rank: int
    order: int
    attempt: int
    until: int
    catalogue: Int64s


@dataclass(frozen=True)
class Stored:
    """The stored data of a run.

    Attributes:
        sources: the writers by authority: lowest rank, then latest attempt, then newest.
        steps: the first and the last step; None if nothing is stored.
        tensors_from: the first step with raw tensor values; before it, retention has left only roll-ups.
    """

    sources: dict[UUID, Source]
    steps: Interval | None
    tensors_from: int

    def raw_from(self, column: str) -> int:
        """The first step with raw rows of a column, by its name on the wire."""
        return self.tensors_from if column.startswith(TENSOR) else 0


def stored_of(run_id: UUID) -> Stored:
    """Read `Stored` from one snapshot."""
    return stored_of_runs([run_id])[run_id]


def stored_of_runs(run_ids: Sequence[UUID]) -> dict[UUID, Stored]:
    """Read `Stored` of several runs in one query."""
    rows = sql.fetch(
        """
        SELECT w.run_id, uuid, rank, attempt, first_step, last_step, catalogue, raw_from
        FROM runs_writer w LEFT JOIN telemetry_rolling r ON r.run_id = w.run_id
        WHERE w.run_id = ANY(%(runs)s::uuid[])
        ORDER BY w.run_id, rank, attempt DESC, created_at DESC, uuid
        """,
        {"runs": list(run_ids)},
    )
    by_run: dict[UUID, list[_Row]] = {run_id: [] for run_id in run_ids}
    for run_id, *row in rows:
        by_run[run_id].append(tuple(row))
    return {run_id: _stored(of_run) for run_id, of_run in by_run.items()}


_Row = tuple[Any, ...]


def _stored(rows: Sequence[_Row]) -> Stored:
    """`Stored` of the writers of one run, by authority."""
    cuts = cutoffs((attempt, first) for _, _, attempt, first, _, _, _ in rows)
    writers = {
        uuid: Source(
            uuid=uuid,
            rank=rank,
            order=order,
            attempt=attempt,
            until=cuts.get(attempt, EVERY_STEP),
            catalogue=np.asarray(catalogue, np.int64),
        )
        for order, (uuid, rank, attempt, _, _, catalogue, _) in enumerate(rows)
    }
    steps = _range([(attempt, first, last) for _, _, attempt, first, last, _, _ in rows], cuts)
    return Stored(writers, steps, (rows[0][6] if rows else None) or 0)


def sources_of(run_id: UUID) -> dict[UUID, Source]:
    """The writers of a run by authority; see `Stored.sources`."""
    return stored_of(run_id).sources


def cutoffs_of(run_id: UUID) -> dict[int, int]:
    """The cutoffs of a run; see `cutoffs`."""
    rows = sql.fetch("SELECT attempt, first_step FROM runs_writer WHERE run_id = %(run)s", {"run": run_id})
    return cutoffs((attempt, first) for attempt, first in rows)


def cutoffs(writers: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """By attempt, the first step stored by any later attempt. Attempts without a later one are left out.

    `writers` has the attempt of each writer and its first stored step, None if it has stored nothing.
    """
    firsts: dict[int, int] = {}
    attempts = set()
    for attempt, first in writers:
        attempts.add(attempt)
        if first is not None:
            firsts[attempt] = min(first, firsts.get(attempt, first))
    cuts = {}
    for attempt in attempts:
        later = [first for other, first in firsts.items() if other > attempt]
        if later:
            cuts[attempt] = min(later)
    return cuts


def step_range(run_id: UUID) -> tuple[int, int] | None:
    """The first and the last stored step; None if nothing is stored.

    Steps that a later attempt has replaced do not count.
    """
    rows = sql.fetch(
        "SELECT attempt, first_step, last_step FROM runs_writer WHERE run_id = %(run)s", {"run": run_id}
    )
    return _range(rows, cutoffs((attempt, first) for attempt, first, _ in rows))


def _range(
    writers: Iterable[tuple[int, int | None, int | None]], cuts: dict[int, int]
) -> tuple[int, int] | None:
    """`writers` has the attempt, the first and the last stored step of each writer."""
    attempts = [
        (attempt, first, last) for attempt, first, last in writers if first is not None and last is not None
    ]
    if not attempts:
        return None
    begin = min(first for _, first, _ in attempts)
    return begin, max(begin, *(min(last, cuts.get(attempt, last + 1) - 1) for attempt, _, last in attempts))


@dataclass(frozen=True, kw_only=True)
class WriterPosition:
    """The stored part of a writer.

    Attributes:
        next_seq: the number behind that of its last message.
        rows, points: those of its batches.
        attempt: None if the writer is not there.
    """

    next_seq: int
    rows: int
    points: int
    attempt: int | None


def position_of(run_id: UUID, writer: UUID) -> WriterPosition:
    """Read what is stored of a writer, from one snapshot."""
    ((next_seq, rows, points, attempt),) = sql.fetch(
        """
        WITH stored AS (
            SELECT rows, points FROM telemetry_chunk WHERE run_id = %(run)s AND writer = %(writer)s
            UNION ALL
            SELECT rows, points FROM telemetry_block WHERE run_id = %(run)s AND writer = %(writer)s
        )
        SELECT
            (SELECT coalesce(max(seq) + 1, 0) FROM ingest_receipt
             WHERE run_id = %(run)s AND writer = %(writer)s),
            (SELECT coalesce(sum(rows), 0) FROM stored),
            (SELECT coalesce(sum(points), 0) FROM stored),
            (SELECT attempt FROM runs_writer WHERE run_id = %(run)s AND uuid = %(writer)s)
        """,
        {"run": run_id, "writer": writer},
        replica.PRIMARY,
    )
    return WriterPosition(next_seq=int(next_seq), rows=int(rows), points=int(points), attempt=attempt)
