"""Many small chunks into few large ones.

A long run sends a chunk every few seconds; a query opens each. Adjacent chunks of one writer are merged once
they fill a large one, and the rest when the run is over: a row is rewritten once or twice. A merge is one
transaction: killed anywhere, it has happened or it has not. Whether a message was stored is the business of
ingest.Receipt, which merging does not touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import numpy as np
from django.db import transaction
from django.db.models import Count, F, Q
from numpy.typing import NDArray

from fp8scope_dashboard.runs.models import RunState, Writer
from fp8scope_dashboard.telemetry.codec import ChunkData, Float64s, decode, encode
from fp8scope_dashboard.telemetry.models import Chunk
from fp8scope_dashboard.telemetry.queries import contiguous_until

# A merged chunk is full at any of these; the last bounds its memory: 32 MB of float64.
FULL_CHUNKS = 256
FULL_ROWS = 8_192
FULL_CELLS = 4_000_000
# Merges of one run before the others have their turn.
MERGES_AT_ONCE = 64
OVER = (RunState.FINISHED, RunState.FAILED)


def runs_to_compact() -> list[UUID]:
    """Runs with a writer that has enough small chunks; of runs that are over, any two."""
    small = Chunk.objects.filter(seq=F("last_seq")).values("run_id", "writer").annotate(count=Count("seq"))
    enough = Q(count__gte=FULL_CHUNKS) | Q(count__gte=2, run__state__in=OVER)
    return list(small.filter(enough).order_by("run_id").values_list("run_id", flat=True).distinct())


def compact_run(run_id: UUID) -> int:
    """Merge what fills large chunks, and all of what is left when the run is over.

    Safe to run at any time, twice, and by several workers at once. Returns the number of merges.
    """
    writers = Writer.objects.filter(run_id=run_id).order_by("uuid")
    merges = 0
    for uuid, state in writers.values_list("uuid", "run__state"):
        for seqs in _stretches(run_id, uuid, everything=state in OVER):
            if merges == MERGES_AT_ONCE:
                return merges
            merges += _merge(run_id, uuid, seqs)
    return merges


def _stretches(run_id: UUID, writer: UUID, *, everything: bool) -> list[list[int]]:
    """Seqs of adjacent chunks to merge, each stretch for one large chunk.

    Only below the first gap: a batch that is still on its way must find its place between two chunks.
    """
    rows = Chunk.objects.filter(run_id=run_id, writer=writer).order_by("seq")
    arrived = rows.filter(last_seq__lt=contiguous_until(run_id, writer))
    found: list[list[int]] = []
    stretch: list[int] = []
    row_count = point_count = 0
    for seq, last_seq, chunk_rows, chunk_points in arrived.values_list("seq", "last_seq", "rows", "points"):
        full = len(stretch) == FULL_CHUNKS
        full |= row_count + chunk_rows > FULL_ROWS or point_count + chunk_points > FULL_CELLS
        # While the run goes on, what is merged stays: else it would be rewritten with every few small ones.
        merged = not everything and seq != last_seq
        if full or merged:
            found.append(stretch)
            stretch, row_count, point_count = [], 0, 0
        if not merged:
            stretch.append(seq)
            row_count, point_count = row_count + chunk_rows, point_count + chunk_points
    if everything or len(stretch) == FULL_CHUNKS:
        found.append(stretch)
    return [seqs for seqs in found if len(seqs) > 1]


@transaction.atomic
def _merge(run_id: UUID, writer: UUID, seqs: Sequence[int]) -> int:
    """Replace chunks by one. Returns 0 where there is nothing (any more) to merge."""
    rows = Chunk.objects.filter(run_id=run_id, writer=writer, seq__in=seqs).order_by("seq")
    # Another worker that merges the same waits here, and then finds them changed.
    locked = list(rows.select_for_update())
    if [chunk.seq for chunk in locked] != list(seqs):
        return 0
    parts: list[ChunkData] = []
    cells = 0
    for chunk in locked:
        part = _with_seqs(decode(chunk.body), chunk.seq)
        cells += _cells(part)
        # Points do not tell how much room nulls take.
        if parts and cells > FULL_CELLS:
            break
        parts.append(part)
    chosen = locked[: len(parts)]
    if len(chosen) < 2:
        return 0
    rows.filter(seq__in=[chunk.seq for chunk in chosen]).delete()
    Chunk.objects.create(
        run_id=run_id,
        writer=writer,
        seq=chosen[0].seq,
        last_seq=chosen[-1].last_seq,
        first_step=min(chunk.first_step for chunk in chosen),
        last_step=max(chunk.last_step for chunk in chosen),
        rows=sum(chunk.rows for chunk in chosen),
        points=sum(chunk.points for chunk in chosen),
        body=encode(concatenate(parts)),
        received_at=max(chunk.received_at for chunk in chosen),
    )
    return 1


def concatenate(parts: Sequence[ChunkData]) -> ChunkData:
    """The parts' rows one after the other; columns that a part lacks are not logged, not observed there."""
    scalars = sorted(set().union(*(part.scalars for part in parts)))
    statistics = sorted(set().union(*(part.statistics for part in parts)))
    return ChunkData(
        steps=np.concatenate([part.steps for part in parts]),
        times=np.concatenate([part.times for part in parts]),
        scalars={n: np.concatenate([part.scalars.get(n, _nothing(part)) for part in parts]) for n in scalars},
        logged={n: np.concatenate([part.logged.get(n, _never(part)) for part in parts]) for n in scalars},
        statistics={n: _stack([part.statistics.get(n) for part in parts], parts) for n in statistics},
        seqs=np.concatenate([part.seqs for part in parts if part.seqs is not None]),
    )


def _with_seqs(data: ChunkData, seq: int) -> ChunkData:
    if data.seqs is not None:
        return data
    seqs = np.full(len(data), seq, np.int64)
    return ChunkData(data.steps, data.times, data.scalars, data.logged, data.statistics, seqs)


def _cells(data: ChunkData) -> int:
    width = len(data.scalars) + sum(int(values.shape[1]) for values in data.statistics.values())
    return len(data) * width


def _nothing(part: ChunkData) -> Float64s:
    return np.full(len(part), np.nan)


def _never(part: ChunkData) -> NDArray[np.bool_]:
    return np.zeros(len(part), bool)


def _stack(matrices: Sequence[Float64s | None], parts: Sequence[ChunkData]) -> Float64s:
    """float64[all rows, widest], NaN where a part has no such column."""
    width = max(matrix.shape[1] for matrix in matrices if matrix is not None)
    stacked = np.full((sum(map(len, parts)), width), np.nan)
    begin = 0
    for matrix, part in zip(matrices, parts, strict=True):
        if matrix is not None:
            stacked[begin : begin + len(part), : matrix.shape[1]] = matrix
        begin += len(part)
    return stacked
