"""Chunks into blocks, small blocks into larger ones, blocks into roll-ups.

A chunk comes every few seconds and holds all series of a few steps; a block holds each series' values of
thousands of steps together. Every change is one transaction under the run's lock: killed anywhere, it has
happened or it has not, and several workers never do the same. Whether a message was stored is the business
of ingest.Receipt, which compaction does not touch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from uuid import UUID

import numpy as np
from django.db import transaction
from django.db.models import Count, Min, Q, Sum
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.telemetry import blocks
from fp8scope_dashboard.telemetry.locks import lock_run
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling
from fp8scope_dashboard.telemetry.replay import contiguous_until
from fp8scope_dashboard.telemetry.rollups import schedule

# A block is made once a writer has any of these in chunks. Until then queries open the chunks one by one.
ENOUGH_CHUNKS = 256
ENOUGH_ROWS = 1_024
ENOUGH_POINTS = 8_000_000
ENOUGH_AGE = timedelta(minutes=10)
# A block is full at any of these; the last two bound memory: 64 MB a statistic, and the bodies as they came.
FULL_ROWS = 8_192
FULL_POINTS = 64_000_000
FULL_CHUNKS = 4_096
# So many blocks that are not full are merged although together they are not full either.
MOST_SMALL_BLOCKS = 16
# A message that is missing is waited for this long before later ones are put into a block without it. When
# it comes after all, it makes a block of its own.
GRACE = timedelta(minutes=2)
# Nothing more is expected of a run that has been silent so long.
ABANDONED = timedelta(hours=1)
OVER = (RunState.FINISHED, RunState.FAILED)
# Transactions for one run, and seconds after which no further one is begun: then others have their turn.
CHANGES_AT_ONCE = 16
SECONDS_AT_ONCE = 60.0


def runs_to_compact() -> list[UUID]:
    """Runs with enough in chunks, or any once the run is over; and those left unfinished."""
    now = timezone.now()
    ended = Q(run__state__in=OVER) | Q(run__heartbeat_at__lt=now - ABANDONED)
    chunks = Chunk.objects.order_by("run_id").values("run_id", "writer")
    found = chunks.annotate(
        count=Count("seq"), row_count=Sum("rows"), point_count=Sum("points"), oldest=Min("received_at")
    ).filter(
        ended
        | Q(count__gte=ENOUGH_CHUNKS)
        | Q(row_count__gte=ENOUGH_ROWS)
        | Q(point_count__gte=ENOUGH_POINTS)
        | Q(oldest__lt=now - ENOUGH_AGE)
    )
    pending = Rolling.objects.filter(pending=True).values_list("run_id", flat=True)
    return sorted({*found.values_list("run_id", flat=True), *pending})


def compact_run(run_id: UUID, most: int = CHANGES_AT_ONCE) -> int:
    """Make up to `most` changes, each a transaction; none is begun after SECONDS_AT_ONCE.

    Safe to run at any time, twice, and by several workers at once. Returns how many; `most` when there may be
    more to do, fewer when all is done.
    """
    changes, deadline = 0, time.monotonic() + SECONDS_AT_ONCE
    for step in (_chunks_to_block, _merge_blocks, schedule.roll):
        while changes < most and _locked(run_id, step):
            changes += 1
            if time.monotonic() > deadline:
                return most
    if changes < most:
        _locked(run_id, _settle)
    return changes


@transaction.atomic
def _locked(run_id: UUID, change: Callable[[Run], bool]) -> bool:
    """Make one change to a run that exists and that no other worker is at. False: there was none to make."""
    if not lock_run(run_id):
        return False
    run = Run.objects.filter(pk=run_id).first()
    return run is not None and change(run)


def is_over(run: Run) -> bool:
    """Whether no more rows are expected."""
    return run.state in OVER or run.heartbeat_at < timezone.now() - ABANDONED


def _chunks_to_block(run: Run) -> bool:
    for writer in Writer.objects.filter(run=run).order_by("rank", "uuid"):
        stretch = _stretch(run, writer.uuid)
        if stretch:
            chunks = list(Chunk.objects.filter(run=run, writer=writer.uuid, seq__in=stretch).order_by("seq"))
            block = blocks.from_chunks(chunks, np.asarray(writer.catalogue, np.int64))
            schedule.note_block(run.id, block.first_step, block.last_step)
            return True
    return False


def _stretch(run: Run, writer: UUID) -> list[int]:
    """The seqs of the chunks that shall become the writer's next block; none when it is too early."""
    waiting = Chunk.objects.filter(run=run, writer=writer).order_by("seq")
    headers = list(waiting.values_list("seq", "last_seq", "rows", "points", "received_at")[:FULL_CHUNKS])
    if not headers:
        return []
    over = is_over(run)
    newest = Block.objects.filter(run=run, writer=writer).order_by("-last_seq").first()
    arrived = contiguous_until(run.id, writer, 0 if newest is None else newest.last_seq + 1)
    patient = timezone.now() - GRACE
    seqs: list[int] = []
    rows = points = 0
    oldest = headers[0][4]
    for seq, last_seq, chunk_rows, chunk_points, received in headers:
        if not (over or last_seq < arrived or received < patient):
            break
        if seqs and (rows + chunk_rows > FULL_ROWS or points + chunk_points > FULL_POINTS):
            return seqs
        seqs.append(seq)
        rows, points, oldest = rows + chunk_rows, points + chunk_points, min(oldest, received)
    enough = (
        over
        or len(seqs) >= ENOUGH_CHUNKS
        or rows >= ENOUGH_ROWS
        or points >= ENOUGH_POINTS
        or oldest < timezone.now() - ENOUGH_AGE
    )
    return seqs if enough else []


def _merge_blocks(run: Run) -> bool:
    over = is_over(run)
    writers = Block.objects.filter(run=run, rows__lt=FULL_ROWS).values_list("writer", flat=True).distinct()
    for writer in writers.order_by("writer"):
        stretch = _small_blocks(list(Block.objects.filter(run=run, writer=writer).order_by("seq")), over)
        if stretch:
            blocks.from_blocks(stretch)
            return True
    return False


def _small_blocks(stored: Sequence[Block], over: bool) -> list[Block]:
    """Neighbours to be merged: as many as make a full one; of too many small ones, or at the end, all."""
    stretch: list[Block] = []
    for block in stored:
        small = block.rows <= FULL_ROWS // 2
        overflows = sum(each.rows for each in stretch) + block.rows > FULL_ROWS
        if (overflows or not small) and _worth_merging(stretch, over, fills=overflows and small):
            return stretch
        if overflows or not small:
            stretch = []
        if small:
            stretch.append(block)
    return stretch if _worth_merging(stretch, over, fills=False) else []


def _worth_merging(stretch: Sequence[Block], over: bool, *, fills: bool) -> bool:
    return len(stretch) > 1 and (fills or over or len(stretch) >= MOST_SMALL_BLOCKS)


def _settle(run: Run) -> bool:
    """Nothing is left to do: of a run that is over, say so."""
    if is_over(run) and not Chunk.objects.filter(run=run).exists():
        return bool(Rolling.objects.filter(run=run, pending=True).update(pending=False))
    return False
