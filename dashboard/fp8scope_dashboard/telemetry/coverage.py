"""Decide which roll-ups and which raw rows cover a range of steps."""

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
    """The covered buckets of roll-ups and the intervals of raw rows. Together they cover each step once."""

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
    """Cover steps first..last with buckets of at most `stride` steps, and the rest with raw rows.

    If `stride` is None, use raw rows only. Tensor rows that retention has deleted are replaced by the finest
    buckets, even if late rows are still missing in these; the next compaction adds them.
    """
    state = sql.fetch("SELECT until, raw_from FROM telemetry_rolling WHERE run_id = %(run)s", {"run": run_id})
    until, raw_from = state[0] if state else (0, 0)
    if not any(name.startswith(TENSOR) for name in names):
        raw_from = 0
    if not state or (stride is None and first >= raw_from):
        return Cover([], [(first, last)])
    cuts = cutoffs_of(run_id)
    # Read before the roll-ups: rows that leave the chunks in between are then marked as stale there.
    late = _chunks_of(run_id, max(first, raw_from), min(last, until - 1))

    def ask(size: int, low: int, high: int) -> Rolled:
        rolled = read.read(run_id, names, tensors, size, low, high, parts, cuts, raw_from)
        for start, end in late:
            begin = max(start, raw_from)
            rolled.covered[max(begin // size - low, 0) : max(end // size + 1 - low, 0)] = False
        return rolled

    result = Cover([], [])
    _fill(ask, result, first, last, stride or 0)
    raw: list[Interval] = []
    for begin, end in merge_intervals(result.raw):
        if begin < raw_from:
            # A bucket that reaches beyond the range is better than nothing.
            rolled = ask(FINEST, begin // FINEST, min(end, raw_from - 1) // FINEST)
            result.rolled.append(rolled)
            for low in (rolled.first + np.flatnonzero(~rolled.covered)).tolist():
                raw.append((max(begin, low * FINEST), min(end, (low + 1) * FINEST - 1)))
        if end >= raw_from:
            raw.append((max(begin, raw_from), end))
    return Cover(result.rolled, merge_intervals(raw))


def _fill(ask: Callable[[int, int, int], Rolled], result: Cover, first: int, last: int, stride: int) -> None:
    """Cover first..last, with finer buckets where coarser ones are missing."""
    if first > last:
        return
    if stride < FINEST:
        result.raw.append((first, last))
        return
    low, high = -(-first // stride), (last + 1) // stride - 1
    if low > high:
        _fill(ask, result, first, last, stride // FACTOR)
        return
    rolled = ask(stride, low, high)
    result.rolled.append(rolled)
    edges = np.flatnonzero(np.diff(rolled.covered.astype(np.int8), prepend=0, append=0))
    begin = first
    for start, stop in edges.reshape(-1, 2).tolist():
        _fill(ask, result, begin, (low + start) * stride - 1, stride // FACTOR)
        begin = (low + stop) * stride
    _fill(ask, result, begin, last, stride // FACTOR)


def _chunks_of(run_id: UUID, first: int, last: int) -> list[Interval]:
    """The steps of rows that are not compacted yet."""
    rows = Chunk.objects.filter(run_id=run_id, last_step__gte=first, first_step__lte=last)
    return merge_intervals(list(rows.values_list("first_step", "last_step")))


def merge_intervals(intervals: list[Interval]) -> list[Interval]:
    """Sort intervals and merge those that overlap or touch."""
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
