"""A run's writers as readers of its telemetry see them: whom to believe, and up to where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from fp8scope_dashboard.telemetry import sql
from fp8scope_dashboard.telemetry.codec import Int64s

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


def sources_of(run_id: UUID) -> dict[UUID, Source]:
    """The run's writers, the most authoritative first: lowest rank, then latest attempt, then the newest."""
    rows = sql.fetch(
        """
        SELECT uuid, rank, attempt, first_step, catalogue FROM runs_writer WHERE run_id = %(run)s
        ORDER BY rank, attempt DESC, created_at DESC, uuid
        """,
        {"run": run_id},
    )
    cuts = cutoffs((attempt, first) for _, _, attempt, first, _ in rows)
    return {
        uuid: Source(
            uuid, rank, order, attempt, cuts.get(attempt, EVERY_STEP), np.asarray(catalogue, np.int64)
        )
        for order, (uuid, rank, attempt, _, catalogue) in enumerate(rows)
    }


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
        """
        SELECT attempt, first_step, last_step FROM runs_writer
        WHERE run_id = %(run)s AND first_step IS NOT NULL AND last_step IS NOT NULL
        """,
        {"run": run_id},
    )
    if not rows:
        return None
    cuts = cutoffs((attempt, first) for attempt, first, _ in rows)
    first = min(first for _, first, _ in rows)
    return first, max(first, *(min(last, cuts.get(attempt, last + 1) - 1) for attempt, _, last in rows))
