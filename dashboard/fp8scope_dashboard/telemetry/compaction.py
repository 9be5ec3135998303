"""Compact chunks into blocks, small blocks into larger ones, and blocks into roll-ups.

A chunk arrives every few seconds and holds all series for a few steps; a block holds the values of each
series contiguously for thousands of steps. Each change is one transaction under the lock of the run, so that
a killed worker leaves no partial change, and workers never repeat each other's work. Receipts, which record
the stored messages, are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from uuid import UUID

import numpy as np
from django.db import transaction
from django.db.models import Count, Min, Q, Sum
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.telemetry import blocks
from fp8scope_dashboard.telemetry.cold.bodies import cold_blocks
from fp8scope_dashboard.telemetry.locks import lock_run
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling
from fp8scope_dashboard.telemetry.replay import contiguous_until
from fp8scope_dashboard.telemetry.rollups import schedule

# The chunks of a writer become a block at any of these limits. Until then, queries open chunk by chunk.
ENOUGH_CHUNKS = 256
ENOUGH_ROWS = 1_024
ENOUGH_POINTS = 8_000_000
ENOUGH_AGE = timedelta(minutes=10)
# A block is full at any of these. The last two bound memory: 64 MB per statistic, and the encoded bodies.
FULL_ROWS = 8_192
FULL_POINTS = 64_000_000
FULL_CHUNKS = 4_096
# This many small blocks are merged even if the result is not full.
MAX_SMALL_BLOCKS = 16
# A block waits this long for a missing message. If it arrives later, it becomes a separate block.
GRACE = timedelta(minutes=2)
# A run that is silent for this long is treated as ended.
ABANDONED = timedelta(hours=1)
ENDED = (RunState.FINISHED, RunState.FAILED)
# Limits of one job, so that other runs get their turn: transactions, and seconds until the last one begins.
CHANGES_AT_ONCE = 16
SECONDS_AT_ONCE = 60.0


def runs_to_compact() -> list[UUID]:
    """Runs with enough chunks for a block, ended runs with any chunk, and runs with unfinished work."""
    now = timezone.now()
    ended = Q(run__state__in=ENDED) | Q(run__heartbeat_at__lt=now - ABANDONED)
    chunks = Chunk.objects.order_by("run_id").values("run_id", "writer")
    ready = chunks.annotate(
        count=Count("seq"), row_count=Sum("rows"), point_count=Sum("points"), oldest=Min("received_at")
    ).filter(
        ended
        | Q(count__gte=ENOUGH_CHUNKS)
        | Q(row_count__gte=ENOUGH_ROWS)
        | Q(point_count__gte=ENOUGH_POINTS)
        | Q(oldest__lt=now - ENOUGH_AGE)
    )
    pending = Rolling.objects.filter(pending=True).values_list("run_id", flat=True)
    return sorted({*ready.values_list("run_id", flat=True), *pending})


def compact_run(run_id: UUID, max_changes: int = CHANGES_AT_ONCE) -> int:
    """Make up to `max_changes` changes, each in a transaction, beginning none after SECONDS_AT_ONCE.

    Safe to run at any time, repeatedly, and by several workers concurrently. Returns the number of changes;
    `max_changes` means that there may be more to do.
    """
    changes, deadline = 0, time.monotonic() + SECONDS_AT_ONCE
    for step in (_chunks_to_block, _merge_blocks, schedule.roll):
        while changes < max_changes and _locked(run_id, step):
            changes += 1
            if time.monotonic() > deadline:
                return max_changes
    if changes < max_changes:
        _locked(run_id, _settle)
    return changes


@transaction.atomic
def _locked(run_id: UUID, change: Callable[[Run], bool]) -> bool:
    """Make one change under the lock of the run. Returns False if locked elsewhere or nothing to do."""
    if not lock_run(run_id):
        return False
    run = Run.objects.filter(pk=run_id).first()
    return run is not None and change(run)


def is_over(run: Run) -> bool:
    """Return whether no more rows are expected."""
    return run.state in ENDED or run.heartbeat_at < timezone.now() - ABANDONED


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
    """The seqs of the chunks for the next block of a writer; empty if it is too early."""
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
    cold = cold_blocks(run.id)
    for writer in writers.order_by("writer"):
        stored = list(Block.objects.filter(run=run, writer=writer).order_by("seq"))
        stretch = _small_blocks(stored, over, {seq for of, seq in cold if of == writer})
        if stretch:
            blocks.from_blocks(stretch)
            return True
    return False


def _small_blocks(stored: Sequence[Block], over: bool, cold: Collection[int]) -> list[Block]:
    """Choose neighbours to merge: enough for a full block, or all if there are many or the run has ended.

    Those with these seqs are in the cold store, and stay as they are: late rows need not bring them back.
    """
    stretch: list[Block] = []
    for block in stored:
        small = block.rows <= FULL_ROWS // 2 and block.seq not in cold
        overflows = sum(chunk.rows for chunk in stretch) + block.rows > FULL_ROWS
        if (overflows or not small) and _worth_merging(stretch, over, fills=overflows and small):
            return stretch
        if overflows or not small:
            stretch = []
        if small:
            stretch.append(block)
    return stretch if _worth_merging(stretch, over, fills=False) else []


def _worth_merging(stretch: Sequence[Block], over: bool, *, fills: bool) -> bool:
    return len(stretch) > 1 and (fills or over or len(stretch) >= MAX_SMALL_BLOCKS)


def _settle(run: Run) -> bool:
    """Mark an ended, fully compacted run as done."""
    if is_over(run) and not Chunk.objects.filter(run=run).exists():
        return bool(Rolling.objects.filter(run=run, pending=True).update(pending=False))
    return False
