"""Every question that is asked of the telemetry store. Nobody else reads its tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from django.db import connection
from numpy.typing import NDArray

from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import reading
from fp8scope_dashboard.telemetry.codec import ChunkData, Float64s, Int64s, decode
from fp8scope_dashboard.telemetry.downsample import keep
from fp8scope_dashboard.telemetry.merge import (
    DERIVED,
    Merged,
    Part,
    across_ranks,
    derive,
    first_of_each_step,
    sources,
)
from fp8scope_dashboard.telemetry.models import Chunk

# Cells (steps x tensors) of one statistic that a heat map holds at once: 32 MB.
CELLS_AT_ONCE = 4_000_000
# `top` looks at this many of the run's last steps.
RECENT_STEPS = 100


@dataclass(frozen=True)
class Series:
    """One line: steps int64[N] increasing, values float64[N], times datetime64[us][N] (UTC)."""

    steps: Int64s
    values: Float64s
    times: NDArray[np.datetime64]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Heatmap:
    """Tensors by steps.

    Attributes:
        names: of the T tensors.
        indices: their Tensor.index.
        step_edges: int64[C + 1]; column c holds steps step_edges[c] <= step < step_edges[c + 1].
        values: float64[T, C], the largest value in each column; NaN where nothing was observed.
    """

    names: list[str]
    indices: list[int]
    step_edges: Int64s
    values: Float64s


@dataclass(frozen=True)
class Latest:
    """Every tensor's statistics at the last step that has any: float64[T] per statistic, by Tensor.index."""

    step: int
    names: list[str]
    values: dict[str, Float64s]


def scalar_names(run_id: UUID) -> list[str]:
    """The scalars that the run has logged, sorted."""
    return sorted(Run.objects.values_list("last_scalars", flat=True).get(pk=run_id))


def statistic_names(run_id: UUID) -> list[str]:
    """The tensor statistics that can be asked for: those stored, then those derived from them."""
    stored = Run.objects.values_list("statistics", flat=True).get(pk=run_id)
    return [*stored, *(name for name in DERIVED if set(sources(name)) <= set(stored))]


def writers(run_id: UUID) -> list[UUID]:
    """The processes that write to the run, lowest rank first, of one rank the latest first."""
    return list(reading.sources_of(run_id))


def scalar(
    run_id: UUID, name: str, *, first: int | None = None, last: int | None = None, points: int | None = None
) -> Series:
    """A scalar over steps first..last (inclusive; all when None), at most `points` samples of it when given.

    Where several writers logged the same step the lowest rank's value counts, and of its attempts the latest.
    NaN and infinities are values. Empty when there is none.
    """
    known = reading.sources_of(run_id)
    parts = []
    for writer, data in reading.chunks(run_id, scalars=(name,), statistics=(), first=first, last=last):
        if name in data.logged:
            mask = data.logged[name]
            source = known[writer]
            values = {name: data.scalars[name][mask]}
            parts.append(Part(source.rank, source.order, data.steps[mask], data.times[mask], values))
    if not parts:
        return _no_series()
    merged = first_of_each_step(parts)
    return _series(merged, merged.values[name], points)


def scalars(
    run_ids: Iterable[UUID],
    name: str,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int | None = None,
) -> dict[UUID, Series]:
    """The same scalar of several runs; see `scalar`."""
    return {run_id: scalar(run_id, name, first=first, last=last, points=points) for run_id in run_ids}


def tensor_series(
    run_id: UUID,
    tensor_index: int,
    statistic: str,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int | None = None,
) -> Series:
    """A statistic (stored or derived) of one tensor, over all ranks: counts are added, else the largest.

    `first`, `last` and `points` as for `scalar`.
    """
    merged = _merged(run_id, sources(statistic), np.array([tensor_index]), first, last)
    if merged is None:
        return _no_series()
    values = derive(statistic, merged.values)[:, 0]
    seen = ~np.isnan(values)
    return _series(Merged(merged.steps[seen], merged.times[seen], {}), values[seen], points)


def heatmap(
    run_id: UUID,
    statistic: str,
    *,
    tensors: Sequence[int] | None = None,
    first: int | None = None,
    last: int | None = None,
    columns: int = 400,
) -> Heatmap:
    """A statistic (stored or derived) of many tensors over steps first..last, in at most `columns` columns.

    `tensors` are indices; all of the run when None. Memory is bounded whatever the number of steps.

    Raises:
        ValueError: columns < 1.
    """
    if columns < 1:
        raise ValueError(f"columns must be at least 1, not {columns}")
    names = _tensor_names(run_id, tensors)
    indices = list(names) if tensors is None else [index for index in tensors if index in names]
    stored = reading.step_range(run_id)
    if stored is None or not indices:
        return Heatmap(
            [names[i] for i in indices], indices, np.zeros(1, np.int64), np.zeros((len(indices), 0))
        )
    low = stored[0] if first is None else max(first, stored[0])
    high = max(low, stored[1] if last is None else min(last, stored[1]))
    count = min(columns, high - low + 1)
    edges = low + np.arange(count + 1) * (high - low + 1) // count
    values = np.full((len(indices), count), np.nan)
    width = -(-(high - low + 1) // count)
    together = max(1, CELLS_AT_ONCE // (width * len(indices)))
    for begin in range(0, count, together):
        end = min(begin + together, count)
        merged = _merged(
            run_id, sources(statistic), np.array(indices), int(edges[begin]), int(edges[end]) - 1
        )
        if merged is not None:
            _fill(values, edges, merged.steps, derive(statistic, merged.values))
    return Heatmap([names[i] for i in indices], indices, edges, values)


def latest_statistics(run_id: UUID) -> Latest | None:
    """Every stored and derived statistic of every tensor at the last step observed; None before the first."""
    stored = reading.step_range(run_id)
    names = _tensor_names(run_id, None)
    known = Run.objects.values_list("statistics", flat=True).get(pk=run_id)
    if stored is None or not names or not known:
        return None
    high, width = stored[1], 16
    while high >= stored[0]:
        merged = _merged(run_id, tuple(known), np.array(list(names)), high - width + 1, high)
        if merged is not None:
            row = {name: array[-1:] for name, array in merged.values.items()}
            values = {name: derive(name, row)[0] for name in statistic_names(run_id)}
            return Latest(int(merged.steps[-1]), list(names.values()), values)
        high, width = high - width, width * 4
    return None


def top(run_id: UUID, statistic: str, k: int = 10) -> list[tuple[int, str, float]]:
    """The k tensors (index, name, value) whose statistic was largest within the run's last 100 steps."""
    stored = reading.step_range(run_id)
    if stored is None:
        return []
    recent = heatmap(run_id, statistic, first=stored[1] - RECENT_STEPS + 1, columns=1)
    found = np.flatnonzero(~np.isnan(recent.values).all(axis=1))
    ranked = found[np.argsort(-recent.values[found, 0], kind="stable")][:k]
    return [(recent.indices[i], recent.names[i], float(recent.values[i, 0])) for i in ranked]


def stream(
    run_id: UUID,
    writer: UUID,
    next_seq: int,
    limit: int,
    *,
    scalars: Collection[str] | None = None,
    statistics: Collection[str] | None = None,
) -> list[tuple[int, ChunkData]]:
    """Up to `limit` chunks of one writer from message `next_seq` on, in order: to read every row once.

    Each comes with its last message's seq: go on at that + 1. Only the named columns where names are given.
    Evaluations take seqs as well, so a missing seq is not yet a missing batch: see `contiguous_until`.
    """
    rows = Chunk.objects.filter(run_id=run_id, writer=writer, last_seq__gte=next_seq).order_by("seq")
    found = []
    for seq, last_seq, body in rows.values_list("seq", "last_seq", "body")[:limit]:
        data = decode(body, scalars=scalars, statistics=statistics)
        if seq < next_seq and data.seqs is not None:
            data = data.rows(data.seqs >= next_seq)
        found.append((last_seq, data))
    return found


def contiguous_until(run_id: UUID, writer: UUID, start: int = 0) -> int:
    """The first seq from `start` on that has not arrived from this writer: all before it have."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT max(seq) + 1 FROM (
                SELECT seq, row_number() OVER (ORDER BY seq) - 1 + %s AS expected
                FROM ingest_receipt WHERE run_id = %s AND writer = %s AND seq >= %s
            ) AS arrived WHERE seq = expected
            """,
            [start, run_id, writer, start],
        )
        row = cursor.fetchone()
    return start if row is None or row[0] is None else int(row[0])


def _merged(
    run_id: UUID, names: Sequence[str], tensors: Int64s, first: int | None, last: int | None
) -> Merged | None:
    parts = reading.statistic_parts(run_id, names, tensors, first, last)
    return across_ranks(parts) if parts else None


def _tensor_names(run_id: UUID, tensors: Sequence[int] | None) -> dict[int, str]:
    rows = Tensor.objects.filter(run_id=run_id).order_by("index")
    if tensors is not None:
        rows = rows.filter(index__in=tensors)
    return dict(rows.values_list("index", "name"))


def _fill(values: Float64s, edges: Int64s, steps: Int64s, rows: Float64s) -> None:
    """The largest of each column's rows (float64[N, T], by increasing step) into values (float64[T, C])."""
    column = np.searchsorted(edges, steps, side="right") - 1
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    values[:, column[starts]] = np.fmax.reduceat(rows, starts, axis=0).T


def _series(merged: Merged, values: Float64s, points: int | None) -> Series:
    steps, times = merged.steps, merged.times
    if points is not None and len(steps) > points:
        kept = keep(steps, values, points)
        steps, values, times = steps[kept], values[kept], times[kept]
    return Series(steps, values, times)


def _no_series() -> Series:
    return Series(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, "datetime64[us]"))
