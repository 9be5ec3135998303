"""Query scalars of the last steps, each rank apart: the time of a step differs between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.codec import Float64s, Int64s
from fp8scope_dashboard.telemetry.rank_merge import RankRows, first_of_each_step
from fp8scope_dashboard.telemetry.writers import Source, stored_of

# Rows of all ranks together: more take too long for a page.
MAX_ROWS: Final = 51_200
MIN_STEPS: Final = 10


@dataclass(frozen=True, kw_only=True)
class RankScalars:
    """The rows of one rank: `steps` int64[N], increasing; `values` float64[names, N], NaN if not logged."""

    rank: int
    steps: Int64s
    values: Float64s


def rank_scalars(run_id: UUID, names: Sequence[str], *, steps: int) -> list[RankScalars]:
    """Return the rows with any of these scalars in the last `steps` steps, by rank, of the latest attempt.

    Many ranks have fewer steps. Empty without rows, and for so many ranks that none would have MIN_STEPS.
    """
    stored = stored_of(run_id)
    latest = max((source.attempt for source in stored.sources.values()), default=0)
    sources = {uuid: source for uuid, source in stored.sources.items() if source.attempt == latest}
    ranks = {source.rank for source in sources.values()}
    steps = min(steps, MAX_ROWS // len(ranks)) if ranks else 0
    if stored.steps is None or steps < MIN_STEPS:
        return []
    last = stored.steps[1]
    return _by_rank(run_id, tuple(names), (last - steps + 1, last), sources)


def lowest_rank_scalars(
    run_id: UUID, names: Sequence[str], first: int | None, last: int | None, *, most: int
) -> RankScalars | None:
    """Return the rows of the lowest rank with any of these scalars; None without.

    Of the steps first..last the last `most`, and of all attempts the rows that count. Unlike in `scalar`, a
    step that lacks a scalar does not take it from another rank: what a rank did in a step belongs together.
    """
    stored = stored_of(run_id)
    if stored.steps is None:
        return None
    end = stored.steps[1] if last is None else min(last, stored.steps[1])
    begin = max(stored.steps[0] if first is None else first, stored.steps[0], end - most + 1)
    for rank in sorted({source.rank for source in stored.sources.values()}):
        mine = {uuid: source for uuid, source in stored.sources.items() if source.rank == rank}
        # One writer at a time: the rows of other ranks are not read.
        parts = [
            part
            for uuid, source in mine.items()
            for part in rows.scalars_parts(
                run_id, tuple(names), (begin, end), sources={uuid: source}, timed=False
            )
        ]
        if any(len(scalar.steps) for part in parts for scalar in part.values()):
            return _merged(rank, tuple(names), parts)
    return None


def _by_rank(
    run_id: UUID, names: tuple[str, ...], between: tuple[int, int], sources: dict[UUID, Source]
) -> list[RankScalars]:
    parts = [
        (next(iter(part.values())).rank, part)
        for part in rows.scalars_parts(run_id, names, between, sources=sources, timed=False)
    ]
    parts.sort(key=itemgetter(0))
    return [
        _merged(rank, names, [part for _, part in of_rank])
        for rank, of_rank in groupby(parts, key=itemgetter(0))
    ]


def _merged(rank: int, names: tuple[str, ...], parts: Sequence[dict[str, RankRows]]) -> RankScalars:
    """The rows of a rank's writers, which are its process and the forked children of it."""
    merged = [first_of_each_step([part[name] for part in parts]) for name in names]
    steps = np.unique(np.concatenate([scalar.steps for scalar in merged]))
    values = np.full((len(names), len(steps)), np.nan)
    for row, name, scalar in zip(values, names, merged, strict=True):
        row[np.searchsorted(steps, scalar.steps)] = scalar.values[name]
    return RankScalars(rank=rank, steps=steps, values=values)
