"""Walking through a run's chunks. What the queries share; nobody else reads the table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from django.db import transaction
from django.db.models import Max, Min

from fp8scope_dashboard.runs.models import Writer
from fp8scope_dashboard.telemetry.codec import ChunkData, Float64s, Int64s, decode
from fp8scope_dashboard.telemetry.merge import Part
from fp8scope_dashboard.telemetry.models import Chunk

# Chunks fetched at a time: a body may have megabytes.
FETCHED_TOGETHER = 16


@dataclass(frozen=True)
class Source:
    """A writer as a reader sees it; `order` as in merge.Part."""

    uuid: UUID
    rank: int
    order: int
    catalogue: Int64s


def sources_of(run_id: UUID) -> dict[UUID, Source]:
    """The run's writers, the most authoritative first: lowest rank, and of its attempts the latest."""
    rows = Writer.objects.filter(run_id=run_id).order_by("rank", "-created_at", "uuid")
    found = rows.values_list("uuid", "rank", "catalogue")
    return {
        uuid: Source(uuid, rank, order, np.asarray(catalogue, np.int64))
        for order, (uuid, rank, catalogue) in enumerate(found)
    }


def step_range(run_id: UUID) -> tuple[int, int] | None:
    """The run's first and last stored step; None when nothing is stored."""
    found = Chunk.objects.filter(run_id=run_id).aggregate(first=Min("first_step"), last=Max("last_step"))
    return None if found["first"] is None else (found["first"], found["last"])


def chunks(
    run_id: UUID,
    *,
    scalars: Collection[str] | None = None,
    statistics: Collection[str] | None = None,
    first: int | None = None,
    last: int | None = None,
) -> Iterator[tuple[UUID, ChunkData]]:
    """The rows of steps first..last (inclusive), writer by writer, each in the order of sending.

    One statement sees one state of the table: chunks being merged meanwhile are neither missed nor doubled.
    """
    rows = Chunk.objects.filter(run_id=run_id).order_by("writer", "seq")
    if first is not None:
        rows = rows.filter(last_step__gte=first)
    if last is not None:
        rows = rows.filter(first_step__lte=last)
    # In a transaction the server-side cursor hands rows over as found; outside it would copy all first.
    with transaction.atomic():
        for writer, body in rows.values_list("writer", "body").iterator(FETCHED_TOGETHER):
            data = _within(decode(body, scalars=scalars, statistics=statistics), first, last)
            if len(data):
                yield writer, data


def statistic_parts(
    run_id: UUID, names: Sequence[str], tensors: Int64s, first: int | None, last: int | None
) -> list[Part]:
    """Stored statistics of some tensors (by index): parts of float64[R, T], with the rows that have any."""
    known = sources_of(run_id)
    parts = []
    for writer, data in chunks(run_id, scalars=(), statistics=names, first=first, last=last):
        source = known[writer]
        values = {name: _columns(data.statistics.get(name), source, tensors, len(data)) for name in names}
        observed = np.any([~np.isnan(array).all(axis=1) for array in values.values()], axis=0)
        if not observed.all():
            values = {name: array[observed] for name, array in values.items()}
        if observed.any():
            steps, times = data.steps[observed], data.times[observed]
            parts.append(Part(source.rank, source.order, steps, times, values))
    return parts


def _within(data: ChunkData, first: int | None, last: int | None) -> ChunkData:
    inside = np.ones(len(data), bool)
    if first is not None:
        inside &= data.steps >= first
    if last is not None:
        inside &= data.steps <= last
    return data if inside.all() else data.rows(inside)


def _columns(values: Float64s | None, source: Source, tensors: Int64s, rows: int) -> Float64s:
    """The wanted tensors' columns out of a writer's: float64[rows, T], NaN where the writer has none."""
    width = 0 if values is None else values.shape[1]
    catalogue = source.catalogue[:width]
    if values is not None and np.array_equal(catalogue, tensors):
        return values
    out = np.full((rows, len(tensors)), np.nan)
    if values is not None:
        _, here, there = np.intersect1d(catalogue, tensors, assume_unique=True, return_indices=True)
        out[:, there] = values[:, here]
    return out
