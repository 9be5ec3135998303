"""Decide which steps to roll up, or to roll up again after late rows or a new attempt; see build.py.

Roll-ups hold the results of queries, so that ranks and attempts are merged only once. They cover all steps
below Rolling.until. Steps below it with late rows are marked as stale and rolled up again.
"""

from __future__ import annotations

from uuid import UUID

from django.db.models import F, Max, Min
from django.db.models.functions import Greatest, Least
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.runs.services import SILENT_AFTER
from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.aggregates import FINEST
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling, Tile
from fp8scope_dashboard.telemetry.rollups.build import forget_from, write
from fp8scope_dashboard.telemetry.rollups.read import first_difference
from fp8scope_dashboard.telemetry.tile_codec import cut_tile, decode_integers
from fp8scope_dashboard.telemetry.writers import EVERY_STEP, cutoffs_of

# Steps per transaction. Bounds memory: 256 KB for each part of each statistic of a tile.
MAX_STEPS = 16_384
# The fewest new steps to roll up during a run: each roll-up rewrites the last row of every column, and the
# old version takes space until the next vacuum.
MIN_STEPS = 8_192
# Ended runs with fewer steps need no roll-ups.
SHORT_RUN = 1_024


def note_block(run_id: UUID, first_step: int, last_step: int) -> None:
    """Mark rolled-up steps of a new block as stale. Call in the transaction that writes the block."""
    Rolling.objects.get_or_create(run_id=run_id)
    Rolling.objects.filter(run_id=run_id, pending=False).update(pending=True, cold_due=True)
    Rolling.objects.filter(run_id=run_id, until__gt=first_step).update(
        # LEAST and GREATEST ignore NULL.
        stale_first=Least(F("stale_first"), first_step),
        stale_last=Greatest(F("stale_last"), Least(F("until") - 1, last_step)),
    )


def raw_may_go_until(run_id: UUID) -> int:
    """The step, a multiple of FINEST, below which retention may delete raw values: all are rolled up."""
    state = Rolling.objects.filter(run_id=run_id).first()
    if state is None:
        return 0
    stale = state.until if state.stale_first is None else state.stale_first
    until = min(state.until, stale, first_difference(_known(state), cutoffs_of(run_id)))
    return until // FINEST * FINEST


def roll(run: Run) -> bool:
    """Roll up some steps, in the transaction of the caller and under the lock of the run.

    Returns False if there is nothing to do.
    """
    if not Block.objects.filter(run=run).exists():
        return False
    state = Rolling.objects.get_or_create(run=run)[0]
    _invalidate_replaced(run.id, state)
    if state.stale_first is not None and state.stale_last is not None:
        first = state.stale_first // FINEST * FINEST
        last = min(_round_up(state.stale_last + 1), state.until, first + MAX_STEPS)
        write(run, _known(state), state.until, state.raw_from, first, last)
        done = last > state.stale_last
        state.stale_first, state.stale_last = (None, None) if done else (last, state.stale_last)
        state.save(update_fields=["stale_first", "stale_last"])
        return True
    first_step = _next_step(run, state.until)
    if first_step is None:
        return False
    first = max(first_step // FINEST * FINEST, state.until)
    end = _settled_until(run, state)
    if end <= first or (not _ended(run) and end - first < MIN_STEPS):
        return False
    if not state.until and _ended(run) and end - first < SHORT_RUN:
        return False
    last = min(end, first + MAX_STEPS)
    write(run, _known(state), state.until, state.raw_from, first, last)
    state.until = last
    state.save(update_fields=["until"])
    return True


def _known(state: Rolling) -> dict[int, int]:
    return {int(attempt): step for attempt, step in state.cutoffs.items()}


def _invalidate_replaced(run_id: UUID, state: Rolling) -> None:
    """Discard roll-ups from the first step that a later attempt has replaced."""
    now = cutoffs_of(run_id)
    if now == _known(state):
        return
    state.until = min(state.until, first_difference(_known(state), now))
    if state.stale_first is not None and state.stale_first >= state.until:
        state.stale_first = state.stale_last = None
    elif state.stale_last is not None:
        state.stale_last = min(state.stale_last, state.until - 1)
    # Raw rows of the later attempt are not deleted yet.
    state.raw_from = min(state.raw_from, state.until)
    forget_from(run_id, state.until)
    state.cutoffs = now
    state.save(update_fields=["until", "stale_first", "stale_last", "raw_from", "cutoffs"])


def _ended(run: Run) -> bool:
    return run.state in (RunState.FINISHED, RunState.FAILED)


def _settled_until(run: Run, state: Rolling) -> int:
    """The step below which no more rows are expected; those that still arrive are late."""
    stored: int = Block.objects.filter(run=run).aggregate(last=Max("last_step"))["last"]
    writers = list(Writer.objects.filter(run=run).defer("catalogue"))
    # From here on a later attempt has replaced the writer, and nothing that it sends counts.
    progress = _known(state)
    cuts = {writer.uuid: progress.get(writer.attempt, EVERY_STEP) for writer in writers}
    chunks = Chunk.objects.filter(run=run, last_step__gte=state.until).order_by("writer")
    firsts = chunks.values_list("writer").annotate(Min("first_step"))
    waiting = {uuid: first for uuid, first in firsts if first < cuts.get(uuid, EVERY_STEP)}
    if _ended(run) and not waiting:
        return _round_up(stored + 1)
    alive_since = timezone.now() - SILENT_AFTER
    reached = [
        writer.last_step + 1
        for writer in writers
        if writer.last_step is not None and writer.finished_at is None and writer.seen_at > alive_since
        if writer.last_step + 1 < cuts[writer.uuid]
    ]
    settled: int = min([stored + 1, *waiting.values(), *reached])
    return settled // FINEST * FINEST


def _next_step(run: Run, start: int) -> int | None:
    """The first step from `start` on that is in a block; None if there is none."""
    later = Block.objects.filter(run=run, first_step__gte=start).aggregate(first=Min("first_step"))["first"]
    across = Block.objects.filter(run=run, first_step__lt=start, last_step__gte=start)
    candidates = [] if later is None else [later]
    for block in across:
        axis = Tile.objects.get(run=run, name=rows.AXIS, tile=0, writer=block.writer, seq=block.seq)
        series = cut_tile(axis.offsets, axis.body, rows.AXES)
        steps = decode_integers(series[rows.STEPS], block.rows)
        candidates.append(int(steps[steps >= start].min()))
    return min(candidates, default=None)


def _round_up(step: int) -> int:
    return -(-step // FINEST) * FINEST
