"""Read scalars of a run as means over fixed buckets of steps.

Roll-ups hold the sums and counts of complete buckets, and are brought up to date by compaction after late
rows and new attempts (rollups/schedule.py). Only the rows that they do not cover are read one by one, so the
cost depends on the number of buckets and on the rows since the last compaction, not on the run's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.aggregates import FINEST, STRIDES
from fp8scope_dashboard.telemetry.codec import SCALAR, Float64s, Int64s
from fp8scope_dashboard.telemetry.coverage import Cover, cover
from fp8scope_dashboard.telemetry.rank_merge import (
    DATA_HASH,
    Merged,
    RankRows,
    data_hash_across_ranks,
    first_of_each_step,
)
from fp8scope_dashboard.telemetry.rollups.read import Rolled
from fp8scope_dashboard.telemetry.writers import Interval, Stored, stored_of

PARTS: Final = ("sum", "count", "undefined", "last")


@dataclass(frozen=True)
class ScalarMeans:
    """The buckets of a scalar that have a value.

    Attributes:
        ends: int64[B], increasing: the last step of each bucket, at most the last stored step.
        means: float64[B], over the logged values of the bucket; NaN if one of them is NaN, and infinite if
            one is.
        last: float64[B], the last value of the bucket that is not NaN; NaN if there is none.
        counts: int64[B], the number of values.
    """

    ends: Int64s
    means: Float64s
    last: Float64s
    counts: Int64s

    def __len__(self) -> int:
        return len(self.ends)


def scalar_means(
    run_id: UUID,
    strides: Mapping[str, int],
    *,
    first: int | None = None,
    last: int | None = None,
) -> dict[str, ScalarMeans]:
    """Read scalars over the steps first..last (inclusive; all by default) in buckets.

    Bucket j of stride n holds the steps j * n <= step < (j + 1) * n. Which writer counts is as in
    `series.scalar`. The result does not depend on what is compacted.

    Args:
        strides: steps per bucket by scalar, each a power of two. Below telemetry.aggregates.FINEST, every row
            is read.
        first: a multiple of all strides.

    Raises:
        ValueError: a stride is not a power of two, or `first` is not a multiple of it.
    """
    for stride in strides.values():
        if stride < 1 or stride & (stride - 1):
            raise ValueError(f"stride must be a power of two, not {stride}")
        if first is not None and first % stride:
            raise ValueError(f"first must be a multiple of the stride {stride}, not {first}")
    stored = stored_of(run_id)
    buckets = {name: _Buckets(stride) for name, stride in strides.items()}
    if stored.steps is None:
        return {name: _means(bucket, 0) for name, bucket in buckets.items()}
    low = stored.steps[0] if first is None else max(first, stored.steps[0])
    high = stored.steps[1] if last is None else min(last, stored.steps[1])
    if low <= high:
        _fill(run_id, buckets, low, high, stored)
    return {name: _means(bucket, high) for name, bucket in buckets.items()}


def _fill(run_id: UUID, buckets: dict[str, _Buckets], low: int, high: int, stored: Stored) -> None:
    """Add the steps low..high: roll-ups by stride, and the rows that they do not cover."""
    # By intervals of rows: usually those of all strides are the same, and are read once.
    raw: dict[tuple[Interval, ...], list[str]] = {}
    for stride in {bucket.stride for bucket in buckets.values()}:
        names = [name for name, bucket in buckets.items() if bucket.stride == stride]
        covered = _cover(run_id, [SCALAR + name for name in names], low, high, stride)
        for rolled in covered.rolled:
            for name in names:
                buckets[name].add_rolled(rolled, rolled.values[SCALAR + name])
        raw.setdefault(tuple(covered.raw), []).extend(names)
    for between, names in raw.items():
        for name, merged in _rows(run_id, names, between, stored).items():
            buckets[name].add_rows(merged.steps, merged.values[name])


def _cover(run_id: UUID, columns: list[str], low: int, high: int, stride: int) -> Cover:
    """Roll-ups of at most `stride` steps, and the steps that they do not cover."""
    usable = [width for width in STRIDES if width <= stride]
    if not usable:
        return Cover([], [(low, high)])
    return cover(run_id, columns, np.zeros(1, np.int64), PARTS, low // FINEST * FINEST, high, usable[-1])


def _rows(
    run_id: UUID, names: Sequence[str], between: Sequence[Interval], stored: Stored
) -> dict[str, Merged]:
    """The rows of some steps, one per step."""
    if not between:
        return {}
    writers = list(rows.scalars_parts(run_id, tuple(names), *between, sources=stored.sources, timed=False))
    return {name: _merged(name, [parts[name] for parts in writers]) for name in names if writers}


def _merged(name: str, parts: Sequence[RankRows]) -> Merged:
    return data_hash_across_ranks(parts) if name == DATA_HASH else first_of_each_step(parts)


class _Buckets:
    """Adds up pieces of buckets. A piece lies in one bucket; several pieces may lie in the same."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        # One array per call: bucket, first step of the piece, sum, count, whether a value is NaN, last value.
        self._pieces: list[tuple[Int64s, Int64s, Float64s, Float64s, NDArray[np.bool_], Float64s]] = []

    def add_rolled(self, rolled: Rolled, parts: dict[str, Float64s]) -> None:
        filled = np.flatnonzero(rolled.covered & ((parts["count"][0] > 0) | ~np.isnan(parts["undefined"][0])))
        steps = (rolled.first + filled.astype(np.int64)) * rolled.stride
        counts = parts["count"][0, filled]
        sums = np.where(counts > 0, parts["sum"][0, filled], 0.0)
        broken = ~np.isnan(parts["undefined"][0, filled])
        self._pieces.append((steps // self.stride, steps, sums, counts, broken, parts["last"][0, filled]))

    def add_rows(self, steps: Int64s, values: Float64s) -> None:
        nan = np.isnan(values)
        self._pieces.append(
            (steps // self.stride, steps, np.where(nan, 0.0, values), (~nan).astype(float), nan, values)
        )

    def total(self) -> tuple[Int64s, Float64s, Float64s, NDArray[np.bool_], Float64s]:
        """By bucket, in order: its number, sum, count, whether a value is NaN, and the last value."""
        if not self._pieces:
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0, bool), np.zeros(0)
        bucket, steps, sums, counts, broken, last = (
            np.concatenate(column) for column in zip(*self._pieces, strict=True)
        )
        if len(self._pieces) > 1 or not bool((steps[1:] > steps[:-1]).all()):
            order = np.argsort(steps, kind="stable")
            bucket, sums, counts, broken, last = (
                column[order] for column in (bucket, sums, counts, broken, last)
            )
        if not len(bucket):
            return bucket, sums, counts, broken, last
        starts = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
        valued = np.where(np.isnan(last), -1, np.arange(len(last)))
        newest = np.maximum.reduceat(valued, starts)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN
            added = np.add.reduceat(sums, starts)
        return (
            bucket[starts],
            added,
            np.add.reduceat(counts, starts),
            np.logical_or.reduceat(broken, starts),
            np.where(newest >= 0, last[newest], np.nan),
        )


def _means(buckets: _Buckets, high: int) -> ScalarMeans:
    bucket, sums, counts, broken, last = buckets.total()
    ends = np.minimum((bucket + 1) * buckets.stride - 1, high)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(broken, np.nan, sums / counts)
    return ScalarMeans(ends, means, last, counts.astype(np.int64))
