"""Building roll-ups, and keeping them true when rows come late or a run begins anew.

Roll-ups are made of what a query would answer, so that merging ranks and attempts is done once, here. They
cover all steps below Rolling.until; what has come later for these steps is noted as stale and rolled up
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

import numpy as np
from django.db.models import F, Max, Min
from django.db.models.functions import Greatest, Least
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
from fp8scope_dashboard.runs.services import SILENT_AFTER
from fp8scope_dashboard.telemetry import raw, rollups, sql
from fp8scope_dashboard.telemetry.aggregates import (
    FACTOR,
    FINEST,
    PARTS,
    STRIDES,
    Parts,
    aggregate,
    blank,
    combine,
    same_from_terms,
)
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, Float64s, Int64s
from fp8scope_dashboard.telemetry.merge import DERIVED, across_ranks, derive, first_of_each_step, sources
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling, Tile
from fp8scope_dashboard.telemetry.rollups import SPAN, first_difference
from fp8scope_dashboard.telemetry.sources import cutoffs_of
from fp8scope_dashboard.telemetry.tiles import (
    WIDTH,
    cut_tile,
    decode_integers,
    encode_matrix,
    encode_series,
    encode_tile,
)

# Rolled up in one transaction; the second bounds its memory: 64 MB of one tile's statistics.
MOST_STEPS = 16_384
MOST_CELLS = 8_000_000
# While a run goes on, roll-ups are made of this many new steps at least.
FEWEST_STEPS = 2_048
# A run of fewer steps is answered from its blocks.
SHORT_RUN = 1_024

Named = dict[str, Parts]


def note_block(run_id: UUID, first_step: int, last_step: int) -> None:
    """A block was made of chunks, in this transaction: what it holds of steps rolled up before is stale."""
    Rolling.objects.get_or_create(run_id=run_id)
    Rolling.objects.filter(run_id=run_id, pending=False).update(pending=True)
    Rolling.objects.filter(run_id=run_id, until__gt=first_step).update(
        # LEAST and GREATEST pass over NULL.
        stale_first=Least(F("stale_first"), first_step),
        stale_last=Greatest(F("stale_last"), Least(F("until") - 1, last_step)),
    )


def raw_may_go_until(run_id: UUID) -> int:
    """All steps below this (a multiple of FINEST) are rolled up: retention may delete their raw values."""
    state = Rolling.objects.filter(run_id=run_id).first()
    if state is None:
        return 0
    stale = state.until if state.stale_first is None else state.stale_first
    until = min(state.until, stale, first_difference(_known(state), cutoffs_of(run_id)))
    return until // FINEST * FINEST


def roll(run: Run) -> bool:
    """Roll up some steps, in the caller's transaction and under the run's lock. False: nothing is to be
    done.
    """
    if not Block.objects.filter(run=run).exists():
        return False
    state = Rolling.objects.get_or_create(run=run)[0]
    _heed_attempts(run.id, state)
    if state.stale_first is not None and state.stale_last is not None:
        first = state.stale_first // FINEST * FINEST
        last = min(_up(state.stale_last + 1), state.until, first + _most_steps(run))
        _write(run, state, first, last)
        done = last > state.stale_last
        state.stale_first, state.stale_last = (None, None) if done else (last, state.stale_last)
        state.save(update_fields=["stale_first", "stale_last"])
        return True
    first_step = _next_step(run, state.until)
    if first_step is None:
        return False
    first = max(first_step // FINEST * FINEST, state.until)
    end = _settled_until(run, state)
    if end <= first or (not _ended(run) and end - first < FEWEST_STEPS):
        return False
    if not state.until and _ended(run) and end - first < SHORT_RUN:
        return False
    last = min(end, first + _most_steps(run))
    _write(run, state, first, last)
    state.until = last
    state.save(update_fields=["until"])
    return True


def _known(state: Rolling) -> dict[int, int]:
    return {int(attempt): step for attempt, step in state.cutoffs.items()}


def _heed_attempts(run_id: UUID, state: Rolling) -> None:
    """What a later attempt has replaced since is rolled up anew, from its first step on."""
    now = cutoffs_of(run_id)
    if now == _known(state):
        return
    state.until = min(state.until, first_difference(_known(state), now))
    if state.stale_first is not None and state.stale_first >= state.until:
        state.stale_first = state.stale_last = None
    elif state.stale_last is not None:
        state.stale_last = min(state.stale_last, state.until - 1)
    state.cutoffs = now
    state.save(update_fields=["until", "stale_first", "stale_last", "cutoffs"])


def _ended(run: Run) -> bool:
    return run.state in (RunState.FINISHED, RunState.FAILED)


def _settled_until(run: Run, state: Rolling) -> int:
    """Up to which step rows are rather not expected any more (they may still come: then they are late)."""
    stored: int = Block.objects.filter(run=run).aggregate(last=Max("last_step"))["last"]
    waiting = Chunk.objects.filter(run=run, last_step__gte=state.until).aggregate(first=Min("first_step"))
    if _ended(run) and waiting["first"] is None:
        return _up(stored + 1)
    ends: list[int] = [stored + 1]
    if waiting["first"] is not None:
        ends.append(waiting["first"])
    at_it = Writer.objects.filter(
        run=run, finished_at=None, seen_at__gt=timezone.now() - SILENT_AFTER, last_step__isnull=False
    )
    slowest = at_it.aggregate(step=Min("last_step"))["step"]
    if slowest is not None:
        ends.append(slowest + 1)
    return min(ends) // FINEST * FINEST


def _next_step(run: Run, start: int) -> int | None:
    """The first step from `start` on that a block holds: nothing need be rolled up in between."""
    later = Block.objects.filter(run=run, first_step__gte=start).aggregate(first=Min("first_step"))["first"]
    across = Block.objects.filter(run=run, first_step__lt=start, last_step__gte=start)
    found = [] if later is None else [later]
    for block in across:
        axis = Tile.objects.get(run=run, name=raw.AXIS, tile=0, writer=block.writer, seq=block.seq)
        series = cut_tile(axis.offsets, axis.body, raw.AXES)
        steps = decode_integers(series[raw.STEPS], block.rows)
        found.append(int(steps[steps >= start].min()))
    return min(found, default=None)


def _most_steps(run: Run) -> int:
    cells = MOST_CELLS // (WIDTH * max(1, len(run.statistics)))
    return max(FINEST, min(MOST_STEPS, cells) // FINEST * FINEST)


def _up(step: int) -> int:
    return -(-step // FINEST) * FINEST


def _write(run: Run, state: Rolling, first: int, last: int) -> None:
    """Roll up the steps first..last - 1 (multiples of FINEST), and the larger buckets that this completes."""
    until = max(state.until, last)
    work = _Work(run.id, _known(state))
    fresh = _finest(run, first, last)
    tiles = []
    for tile, named in fresh:
        work.put(tile, FINEST, first // FINEST, named, state.until // FINEST)
        tiles.append(tile)
    for fine in STRIDES[:-1]:
        stride = fine * FACTOR
        low, high = first // stride, min(-(-last // stride), until // stride)
        if high <= low:
            return
        for tile, names in tiles_names(tiles, run):
            children = work.get(tile, names, fine, low * FACTOR, high * FACTOR)
            named = {name: combine(parts, fine) for name, parts in children.items()}
            work.put(tile, stride, low, named, state.until // stride)


def tiles_names(tiles: Iterable[tuple[str, int]], run: Run) -> Iterable[tuple[tuple[str, int], list[str]]]:
    """The columns that each group holds: see `_finest`."""
    for group in tiles:
        yield group, _columns(run) if group[0] == TENSOR else [group[0]]


def _columns(run: Run) -> list[str]:
    """The run's tensor columns, derived ones after those that they are derived from."""
    stored = list(run.statistics)
    derived = [name for name in DERIVED if set(sources(name)) <= set(stored)]
    return [TENSOR + name for name in (*stored, *derived)]


def _finest(run: Run, first: int, last: int) -> Iterable[tuple[tuple[str, int], Named]]:
    """Parts of the finest buckets of everything: one tile of all tensor columns, or one scalar, at a time."""
    bucket, count = first // FINEST, (last - first) // FINEST
    yield (raw.AXIS, 0), {raw.AXIS: _axis(run.id, first, last)}
    for name in sorted(run.last_scalars):
        parts = list(raw.scalar_parts(run.id, name, first, last - 1))
        if parts:
            merged = first_of_each_step(parts)
            values = merged.values[name][None]
            yield (
                (SCALAR + name, 0),
                {SCALAR + name: aggregate(merged.steps, values, FINEST, bucket, count, nan_is_value=True)},
            )
    tensors = Tensor.objects.filter(run=run).count()
    for tile in range(-(-tensors // WIDTH)):
        indices = np.arange(tile * WIDTH, min((tile + 1) * WIDTH, tensors))
        merged_tile = across_ranks(raw.tensor_parts(run.id, run.statistics, indices, first, last - 1))
        named: Named = {}
        for column in _columns(run):
            if merged_tile is None or not len(merged_tile.steps):
                named[column] = blank(len(indices), count)
                continue
            values = derive(column.removeprefix(TENSOR), merged_tile.values)
            named[column] = aggregate(merged_tile.steps, values, FINEST, bucket, count)
        yield (TENSOR, tile), named


def _axis(run_id: UUID, first: int, last: int) -> Parts:
    """The time (us since 1970) of each bucket's last row."""
    bucket, count = first // FINEST, (last - first) // FINEST
    steps: Int64s = np.zeros(0, np.int64)
    times: Float64s = np.zeros(0)
    for part in raw.tensor_parts(run_id, (), np.zeros(0, np.int64), first, last - 1):
        steps = np.concatenate([steps, part.steps])
        times = np.concatenate([times, part.times.astype(np.int64).astype(np.float64)])
    order = np.argsort(steps, kind="stable")
    return aggregate(steps[order], times[order][None], FINEST, bucket, count)


class _Work:
    """Rows of the table by group (see `_finest`), read and written within one transaction."""

    def __init__(self, run_id: UUID, cuts: dict[int, int]) -> None:
        self._run_id, self._cutoffs = run_id, cuts
        # How many of a group's series the run has.
        self._series: dict[tuple[str, int], int] = {}

    def get(self, group: tuple[str, int], names: list[str], stride: int, first: int, end: int) -> Named:
        """Parts of the buckets first..end - 1."""
        kind, tile = group
        if kind == raw.AXIS:
            found = rollups.read(
                self._run_id, [], np.zeros(0, np.int64), stride, first, end - 1, (), self._cutoffs
            )
            parts = blank(1, end - first)
            known = ~np.isnat(found.times)
            parts["last"][0, known] = found.times[known].astype(np.int64)
            parts["count"][0, known] = 1.0
            return {raw.AXIS: parts}
        indices = tile * WIDTH + np.arange(self._series[group])
        found = rollups.read(self._run_id, names, indices, stride, first, end - 1, PARTS, self._cutoffs)
        return found.values

    def put(self, group: tuple[str, int], stride: int, first: int, named: Named, stored: int) -> None:
        """Write buckets from `first` on; of those before `stored` the others stay."""
        kind, tile = group
        self._series[group] = len(next(iter(named.values()))["count"])
        end = first + next(iter(named.values()))["count"].shape[1]
        for span in range(first // SPAN, (end - 1) // SPAN + 1):
            low, high = max(first, span * SPAN), min(end, (span + 1) * SPAN)
            kept = min(max(stored, high), (span + 1) * SPAN)
            whole = {
                name: {part: array[:, low - first : high - first] for part, array in parts.items()}
                for name, parts in named.items()
            }
            if low > span * SPAN or kept > high:
                old = self.get(group, list(named), stride, span * SPAN, kept)
                for name, parts in whole.items():
                    for part, array in old[name].items():
                        array[:, low - span * SPAN : high - span * SPAN] = parts[part]
                whole = old
            self._write_span(kind, tile, stride, span, kept - span * SPAN, whole)

    def _write_span(self, kind: str, tile: int, stride: int, span: int, buckets: int, named: Named) -> None:
        gone: list[tuple[object, ...]] = []
        rows: list[tuple[object, ...]] = []
        for name, parts in named.items():
            for part, encoded in _encode(kind, name, parts, named).items():
                key = (self._run_id, name, stride, part, tile, span)
                if encoded is None:
                    gone.append(key)
                else:
                    rows.append((*key, buckets, *encoded))
        sql.write(
            """
            DELETE FROM telemetry_rollup
            WHERE run_id = %s AND name = %s AND stride = %s AND part = %s AND tile = %s AND span = %s
            """,
            gone,
        )
        sql.write(
            """
            INSERT INTO telemetry_rollup (run_id, name, stride, part, tile, span, buckets, offsets, body)
            VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
            ON CONFLICT (run_id, name, stride, part, tile, span) DO UPDATE
            SET buckets = EXCLUDED.buckets, offsets = EXCLUDED.offsets, body = EXCLUDED.body
            """,
            rows,
        )


def _encode(
    kind: str, name: str, parts: Parts, named: Mapping[str, Parts]
) -> dict[str, tuple[list[int], bytes] | None]:
    """The bodies of a column's parts; None where none is needed."""
    if kind == raw.AXIS:
        return {
            "last": encode_tile([encode_series(parts["last"][0], ~np.isnan(parts["last"][0]))]) or ([], b"")
        }
    statistic = name.removeprefix(TENSOR)
    nothing = not parts["count"].any() and bool(np.isnan(parts["undefined"]).all())
    if kind == TENSOR and statistic in DERIVED:
        terms = {term: named[TENSOR + term] for term in sources(statistic)}
        nothing = same_from_terms(statistic, terms, parts)
    if nothing:
        return dict.fromkeys(PARTS)
    return {part: encode_matrix(array, WIDTH if kind == TENSOR else 1) for part, array in parts.items()}
