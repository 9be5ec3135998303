"""Which roll-ups, and which raw rows, answer a question about a range of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.aggregates import FACTOR, FINEST
from fp8scope_dashboard.telemetry.codec import TENSOR, Int64s
from fp8scope_dashboard.telemetry.models import Chunk
from fp8scope_dashboard.telemetry.rollups import read
from fp8scope_dashboard.telemetry.rollups.read import Rolled
from fp8scope_dashboard.telemetry.writers import Interval, cutoffs_of


@dataclass(frozen=True)
class Cover:
    """Buckets (only the covered ones of each count) and intervals of raw rows; together the range, once."""

    rolled: list[Rolled]
    raw: list[Interval]


def cover(
    run_id: UUID,
    names: Sequence[str],
    tensors: Int64s,
    parts: tuple[str, ...],
    first: int,
    last: int,
    stride: int | None,
) -> Cover:
    """Answer steps first..last from buckets of at most `stride` steps, the rest from raw rows.

    `stride` None asks for raw rows; where retention has deleted them, those of tensors, the finest buckets
    stand in. These are trusted in spite of rows that came late: such are added to them with the next
    compaction.
    """
    state = sql.fetch("SELECT until, raw_from FROM telemetry_rolling WHERE run_id = %(run)s", {"run": run_id})
    until, raw_from = state[0] if state else (0, 0)
    if not any(name.startswith(TENSOR) for name in names):
        raw_from = 0
    if not state or (stride is None and first >= raw_from):
        return Cover([], [(first, last)])
    cuts = cutoffs_of(run_id)
    # Before the roll-ups are read: what leaves the chunks in between is noted as stale there.
    late = _chunks_of(run_id, max(first, raw_from), min(last, until - 1))

    def ask(size: int, low: int, high: int) -> Rolled:
        found = read.read(run_id, names, tensors, size, low, high, parts, cuts, raw_from)
        for start, end in late:
            begin = max(start, raw_from)
            found.covered[max(begin // size - low, 0) : max(end // size + 1 - low, 0)] = False
        return found

    found = Cover([], [])
    _fill(ask, found, first, last, stride or 0)
    raw: list[Interval] = []
    for begin, end in _joined(found.raw):
        if begin < raw_from:
            # A bucket that is only partly asked for is better than nothing.
            rolled = ask(FINEST, begin // FINEST, min(end, raw_from - 1) // FINEST)
            found.rolled.append(rolled)
            for low in (rolled.first + np.flatnonzero(~rolled.covered)).tolist():
                raw.append((max(begin, low * FINEST), min(end, (low + 1) * FINEST - 1)))
        if end >= raw_from:
            raw.append((max(begin, raw_from), end))
    return Cover(found.rolled, _joined(raw))


def _fill(ask: Callable[[int, int, int], Rolled], found: Cover, first: int, last: int, stride: int) -> None:
    """Cover first..last, asking for ever finer buckets where there are none."""
    if first > last:
        return
    if stride < FINEST:
        found.raw.append((first, last))
        return
    low, high = -(-first // stride), (last + 1) // stride - 1
    if low > high:
        _fill(ask, found, first, last, stride // FACTOR)
        return
    rolled = ask(stride, low, high)
    found.rolled.append(rolled)
    edges = np.flatnonzero(np.diff(rolled.covered.astype(np.int8), prepend=0, append=0))
    begin = first
    for start, stop in edges.reshape(-1, 2).tolist():
        _fill(ask, found, begin, (low + start) * stride - 1, stride // FACTOR)
        begin = (low + stop) * stride
    _fill(ask, found, begin, last, stride // FACTOR)


def _chunks_of(run_id: UUID, first: int, last: int) -> list[Interval]:
    """The steps of what is not compacted yet."""
    rows = Chunk.objects.filter(run_id=run_id, last_step__gte=first, first_step__lte=last)
    return _joined(list(rows.values_list("first_step", "last_step")))


def _joined(intervals: list[Interval]) -> list[Interval]:
    """The same steps in as few intervals as possible, by step."""
    found: list[Interval] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
