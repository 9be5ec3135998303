"""Query one series over steps, exact or thinned to a number of points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.aggregates import STRIDES
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, Float64s, Int64s
from fp8scope_dashboard.telemetry.coverage import Cover, cover, merge_intervals
from fp8scope_dashboard.telemetry.downsample import keep
from fp8scope_dashboard.telemetry.rank_merge import (
    DATA_HASH,
    RankRows,
    across_ranks,
    data_hash_across_ranks,
    derive,
    first_of_each_step,
    sources,
)
from fp8scope_dashboard.telemetry.rollups.read import Rolled
from fp8scope_dashboard.telemetry.writers import Interval, Stored, stored_of, stored_of_runs

# Up to this many rows, a thinned line is chosen from all of them; beyond, from the extremes of buckets.
MAX_ROWS: Final = 131_072
MAX_BUCKETS: Final = 16_384
# Runs whose rows are read by one statement: a statement takes longer to plan than to read a short run.
RUNS_AT_ONCE: Final = 16
Exact = Callable[[list[Interval], Stored], "Series"]
"""Reads every row of these steps."""
LINE_PARTS: Final = ("max", "min", "argmax", "argmin", "count", "undefined")


@dataclass(frozen=True)
class Series:
    """A line: steps int64[N], increasing; values float64[N]; times datetime64[us][N] in UTC, or NaT.

    In a long thinned line, the time of a point is that of the last step in its bucket.

    Attributes:
        thinned: whether rows of the range are missing, because there are more than were asked for, or because
            retention has left only roll-ups of them.
    """

    steps: Int64s
    values: Float64s
    times: NDArray[np.datetime64]
    thinned: bool = False

    def __len__(self) -> int:
        return len(self.steps)


def scalar(
    run_id: UUID,
    name: str,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int | None = None,
    timed: bool = True,
) -> Series:
    """Return a scalar over the steps first..last (inclusive; all by default).

    If several writers logged a step, the lowest rank counts, and of it the latest attempt. NaN and infinities
    are values. The series is empty if there are none. The scalar `data_hash` adds up over the ranks.

    Args:
        points: thin the line to at most this many points; by default, return every step.
        timed: pass False if you do not need times; it is faster, and the times may be NaT.
    """
    return scalars([run_id], name, first=first, last=last, points=points, timed=timed)[run_id]


def scalars(
    run_ids: Sequence[UUID],
    name: str,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int | None = None,
    timed: bool = True,
) -> dict[UUID, Series]:
    """Return the same scalar of several runs; see `scalar`."""
    together: dict[UUID, list[RankRows]] = {}
    intervals: dict[UUID, Interval] = {}

    def read(run_id: UUID, stored: Stored) -> Series:
        def exact(between: list[Interval], stored: Stored) -> Series:
            if run_id in together and between == [intervals[run_id]]:
                parts = together.pop(run_id)
            else:
                parts = list(rows.scalar_parts(run_id, name, *between, sources=stored.sources, timed=timed))
            if not parts:
                return _no_series()
            merged = data_hash_across_ranks(parts) if name == DATA_HASH else first_of_each_step(parts)
            return Series(merged.steps, merged.values[name], merged.times)

        return _line(run_id, SCALAR + name, 0, exact, (first, last), points, stored)

    lines: dict[UUID, Series] = {}
    every = list(stored_of_runs(run_ids).items())
    for begin in range(0, len(every), RUNS_AT_ONCE):
        some = dict(every[begin : begin + RUNS_AT_ONCE])
        whole = {run_id: _whole(stored, first, last, points) for run_id, stored in some.items()}
        intervals = {run_id: interval for run_id, interval in whole.items() if interval is not None}
        if len(intervals) > 1:
            sources_of_run = {run_id: some[run_id].sources for run_id in intervals}
            together = rows.scalar_parts_of_runs(name, intervals, sources_of_run, timed=timed)
        lines |= {run_id: read(run_id, stored) for run_id, stored in some.items()}
    return lines


def _whole(stored: Stored, first: int | None, last: int | None, points: int | None) -> Interval | None:
    """The steps of a scalar of which all rows are read; None if there are none, or too many."""
    span = _span(stored, first, last)
    return None if span is None or _stride_of(span, points) is not None else span


def tensor_series(
    run_id: UUID,
    tensor_index: int,
    statistic: str,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int | None = None,
    timed: bool = True,
) -> Series:
    """Return a statistic of one tensor, stored or derived, over all ranks: counts add up, else the largest.

    `first`, `last`, `points` and `timed` are as in `scalar`.
    """

    def exact(between: list[Interval], stored: Stored) -> Series:
        wanted, tensors = sources(statistic), np.array([tensor_index])
        merged = across_ranks(
            rows.tensor_parts(run_id, wanted, tensors, *between, sources=stored.sources, timed=timed)
        )
        if merged is None:
            return _no_series()
        values = derive(statistic, merged.values)[0]
        unseen = np.isnan(values)
        if not unseen.any():
            return Series(merged.steps, values, merged.times)
        seen = ~unseen
        return Series(merged.steps[seen], values[seen], merged.times[seen])

    within = (first, last)
    return _line(run_id, TENSOR + statistic, tensor_index, exact, within, points, stored_of(run_id))


def _line(
    run_id: UUID,
    name: str,
    tensor: int,
    exact: Exact,
    within: tuple[int | None, int | None],
    points: int | None,
    stored: Stored,
) -> Series:
    """Read every row of a short or unthinned range; otherwise the extremes of buckets, and both ends."""
    span = _span(stored, *within)
    if span is None:
        return _no_series()
    low, high = span
    stride = _stride_of(span, points)
    coverage = _cover(run_id, name, tensor, stored, low, high, stride)
    beside = exact(coverage.raw, stored) if coverage.raw else _no_series()
    rows_in_buckets = sum(int(_counts(rolled, name).sum()) for rolled in coverage.rolled)
    if stride is not None and rows_in_buckets and rows_in_buckets + len(beside) <= max(points or 0, MAX_ROWS):
        # Few rows in a long range: no bucket needs to stand for them.
        coverage = _cover(run_id, name, tensor, stored, low, high, None)
        beside = exact(coverage.raw, stored) if coverage.raw else _no_series()
    line = _joined([*(_extremes(rolled, name, low, high) for rolled in coverage.rolled), beside])
    return _thinned(replace(line, thinned=_lacks_rows(coverage, name)), points)


def _span(stored: Stored, first: int | None, last: int | None) -> Interval | None:
    """The stored steps of a range; None if there are none."""
    if stored.steps is None:
        return None
    low = stored.steps[0] if first is None else max(first, stored.steps[0])
    high = stored.steps[1] if last is None else min(last, stored.steps[1])
    return (low, high) if low <= high else None


def _stride_of(span: Interval, points: int | None) -> int | None:
    """The steps of a bucket for a thinned line; None if all rows are to be read."""
    return None if points is None else _stride(span[1] - span[0] + 1, points)


def _lacks_rows(coverage: Cover, name: str) -> bool:
    """Return whether a bucket may have more rows than its smallest, its largest and its first NaN."""
    for rolled in coverage.rolled:
        parts = rolled.values[name]
        drawn = 1.0 + (parts["argmin"][0] != parts["argmax"][0])
        more = (_counts(rolled, name) > drawn[rolled.covered]).any()
        # Rows of NaN are not counted.
        if more or not np.isnan(parts["undefined"][0][rolled.covered]).all():
            return True
    return False


def _counts(rolled: Rolled, name: str) -> Float64s:
    """The number of rows in each covered bucket, without those of NaN."""
    counts: Float64s = rolled.values[name]["count"][0][rolled.covered]
    return counts


def _stride(steps: int, points: int) -> int | None:
    """The largest stride with enough points to choose from; None if all rows are to be read."""
    # Each bucket has two points, the smallest and the largest value.
    enough: list[int] = [stride for stride in STRIDES if 2 * (steps // stride) >= points]
    if steps <= MAX_ROWS or not enough:
        return None
    few: int = next((stride for stride in STRIDES if steps // stride <= MAX_BUCKETS), STRIDES[-1])
    return max([few, *enough])


def _cover(
    run_id: UUID, name: str, tensor: int, stored: Stored, low: int, high: int, stride: int | None
) -> Cover:
    """Cover the steps low..high with buckets of at most `stride` steps, and with raw rows at both ends."""
    raw_from = stored.raw_from(name)
    if stride is None and low >= raw_from:
        return Cover([], [(low, high)])
    ask = partial(cover, run_id, [name], np.array([tensor]), LINE_PARTS)
    if stride is None:
        return ask(low, high, None)
    # The line must begin and end with the range: read the first and the last row, and the other rows of their
    # buckets if retention has kept them.
    begin, end = -(-(low + 1) // stride) * stride, high // stride * stride - 1
    if begin > end or low < raw_from:
        begin = low + 1
    if begin > end or end + 1 < raw_from:
        end = high - 1
    inner = ask(begin, end, stride)
    return Cover(inner.rolled, merge_intervals([(low, begin - 1), *inner.raw, (end + 1, high)]))


def _extremes(rolled: Rolled, name: str, low: int, high: int) -> Series:
    """The smallest and the largest value of each covered bucket at their steps, and the first NaN."""
    parts = {part: values[0] for part, values in rolled.values[name].items()}
    begins = (rolled.first + np.arange(len(rolled.covered), dtype=np.int64)) * rolled.stride
    steps, values, times = [], [], []
    for offset, value in (("argmin", parts["min"]), ("argmax", parts["max"]), ("undefined", None)):
        buckets = np.flatnonzero(rolled.covered & ~np.isnan(parts[offset]))
        steps.append(begins[buckets] + parts[offset][buckets].astype(np.int64))
        values.append(np.full(len(buckets), np.nan) if value is None else value[buckets])
        times.append(rolled.times[buckets])
    line = _joined([Series(np.concatenate(steps), np.concatenate(values), np.concatenate(times))])
    inside = (line.steps >= low) & (line.steps <= high)
    return Series(line.steps[inside], line.values[inside], line.times[inside])


def _joined(lines: list[Series]) -> Series:
    """Join lines, sorted by step, each step once."""
    if len(lines) == 1 and (len(lines[0]) < 2 or bool((lines[0].steps[1:] > lines[0].steps[:-1]).all())):
        return lines[0]
    if not lines:
        return _no_series()
    steps, indices = np.unique(np.concatenate([line.steps for line in lines]), return_index=True)
    return Series(
        steps,
        np.concatenate([line.values for line in lines])[indices],
        np.concatenate([line.times for line in lines])[indices],
    )


def _thinned(line: Series, points: int | None) -> Series:
    if points is None or len(line) <= points:
        return line
    positions = keep(line.steps, line.values, points)
    return Series(line.steps[positions], line.values[positions], line.times[positions], thinned=True)


def _no_series() -> Series:
    return Series(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, "datetime64[us]"))
