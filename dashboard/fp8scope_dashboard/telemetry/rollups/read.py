"""Read the parts of roll-up buckets, and decide which buckets are up to date."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.aggregates import (
    BLANK,
    FINEST,
    IMPLIED_FROM,
    Parts,
    from_terms,
    implied,
    needed,
    with_stand_ins,
)
from fp8scope_dashboard.telemetry.codec import Float64s, Int64s
from fp8scope_dashboard.telemetry.rank_merge import DERIVED, sources
from fp8scope_dashboard.telemetry.tile_codec import cut_tile, decode_into, series_by_tile
from fp8scope_dashboard.telemetry.writers import EVERY_STEP

AXIS: Final = "axis"
SPAN: Final = 1024
"""Buckets per row of the table."""

STATEMENT: Final = """
    WITH wanted (tile, low, high) AS (
        SELECT * FROM unnest(%(tiles)s::int[], %(lows)s::int[], %(highs)s::int[])
    )
    SELECT s.until, s.stale_first, s.stale_last, s.cutoffs::text, r.name, r.part, r.tile, r.span, r.buckets,
    r.low,
        CASE WHEN r.whole THEN r.offsets ELSE r.offsets[r.low + 1 : r.high + 2] END,
        CASE WHEN r.whole THEN r.body ELSE
            substring(r.body FROM r.offsets[r.low + 1] + 1 FOR r.offsets[r.high + 2] - r.offsets[r.low + 1])
            END
    FROM telemetry_rolling s
    LEFT JOIN (
        SELECT u.*, w.low, w.high, w.low IS NULL OR cardinality(u.offsets) = 0 AS whole
        FROM telemetry_rollup u
        LEFT JOIN wanted w ON w.tile = u.tile AND u.name <> 'axis'
        WHERE u.run_id = %(run)s AND u.stride = %(stride)s
            AND u.name = ANY(%(columns)s::text[]) AND u.part = ANY(%(parts)s::text[] ||
            '{last,count}'::text[]) AND u.tile = ANY(%(tiles)s::int[] || 0) AND u.span BETWEEN %(first)s AND
            %(last)s AND (u.name = 'axis' OR w.tile IS NOT NULL)
            AND (
                u.part = ANY(%(parts)s::text[]) OR u.name = 'axis'
                OR (u.part = 'count' AND u.name = ANY(%(derived)s::text[]))
            )
    ) r ON true
    WHERE s.run_id = %(run)s
"""


@dataclass(frozen=True)
class Rolled:
    """Buckets first..first + B - 1 of `stride` steps.

    Attributes:
        covered: bool[B], whether the values of the bucket are valid.
        times: datetime64[us][B], the time of the last row in the bucket; NaT if it is empty.
        values: float64[T, B] by name and part.
    """

    stride: int
    first: int
    covered: NDArray[np.bool_]
    times: NDArray[np.datetime64]
    values: dict[str, Parts]


def read(
    run_id: UUID,
    names: Sequence[str],
    tensors: Int64s,
    stride: int,
    first: int,
    last: int,
    parts: tuple[str, ...],
    cutoffs: dict[int, int],
    raw_from: int = 0,
) -> Rolled:
    """Read parts of the buckets first..last (inclusive) of stored and derived columns.

    Buckets built under cutoffs other than the current `cutoffs` are not covered, and neither are buckets with
    late rows, except below `raw_from`, where only roll-ups are left.
    """
    rows = _fetch(run_id, names, tensors, stride, first, last, parts)
    count = last - first + 1
    covered = np.zeros(count, bool)
    times = np.full(count, np.nan)
    cells = _Cells(tensors, first, count)
    for _, _, _, _, name, part, tile, span, buckets, low, offsets, body in rows:
        if name is None:
            break
        if name == AXIS:
            _spread(cut_tile(offsets, body, 1)[0], buckets, span * SPAN - first, times)
            inside = slice(max(span * SPAN - first, 0), max(span * SPAN - first + buckets, 0))
            covered[inside] = True
        else:
            cells.add(name, part, tile, span, buckets, low, offsets, body)
    cells.restore({part for name in names for part in needed(_bare(name), parts)})
    if rows:
        _uncover_stale(covered, first, stride, rows[0][:4], cutoffs, raw_from)
    stamps = np.full(count, "NaT", "datetime64[us]")
    observed = ~np.isnan(times)
    stamps[observed] = times[observed].astype(np.int64).view("datetime64[us]")
    values = {name: {part: cells.of(name, part) for part in parts} for name in names}
    return Rolled(stride, first, covered, stamps, values)


def _fetch(
    run_id: UUID,
    names: Sequence[str],
    tensors: Int64s,
    stride: int,
    first: int,
    last: int,
    parts: tuple[str, ...],
) -> list[tuple[Any, ...]]:
    tiles = series_by_tile(tensors)
    bare = [_bare(name) for name in names]
    derived = [name for name, statistic in zip(names, bare, strict=True) if statistic in DERIVED]
    stored = {_column(term) for s in bare if s in DERIVED for term in sources(s)}
    every = with_stand_ins(part for statistic in bare for part in needed(statistic, parts))
    return sql.fetch(
        STATEMENT,
        {
            "run": run_id,
            "stride": stride,
            "columns": [AXIS, *names, *(stored - set(names))],
            "derived": derived,
            "parts": list(every),
            "first": first // SPAN,
            "last": last // SPAN,
            "tiles": list(tiles),
            "lows": [series.low for series in tiles.values()],
            "highs": [series.high for series in tiles.values()],
        },
    )


class _Cells:
    """Decodes rows into matrices. Derived statistics come from their own rows or from their terms."""

    def __init__(self, tensors: Int64s, first: int, count: int) -> None:
        self._tensors, self._first, self._count = tensors, first, count
        self._values: dict[tuple[str, str], Float64s] = {}
        # By name, tile and span: the cells (series, buckets) of the rows, and the stored parts.
        self._stored: dict[tuple[str, int, int], tuple[tuple[list[int], slice], set[str]]] = {}
        # By derived name: the cells (series, buckets) with rows of its own.
        self._own: dict[str, NDArray[np.bool_]] = {}
        self._tiles = series_by_tile(tensors)

    def add(
        self,
        name: str,
        part: str,
        tile: int,
        span: int,
        buckets: int,
        low: int,
        offsets: list[int],
        body: bytes,
    ) -> None:
        wanted = self._tiles[tile]
        series = cut_tile(offsets, body, wanted.high - low + 1, low)
        matrix = self._matrix(name, part)
        shift = span * SPAN - self._first
        for position, row in wanted.cells:
            _spread(series[position], buckets, shift, matrix[row])
        cells = [row for _, row in wanted.cells], slice(max(shift, 0), max(shift + buckets, 0))
        self._stored.setdefault((name, tile, span), (cells, set()))[1].add(part)
        if part == "count" and _bare(name) in DERIVED:
            self._own.setdefault(name, np.zeros(matrix.shape, bool))[cells] = True

    def restore(self, wanted: Collection[str]) -> None:
        """Compute the wanted parts that are not stored because others imply them."""
        order = [part for part in IMPLIED_FROM if part in with_stand_ins(wanted)]
        for (name, _, _), (cells, stored) in self._stored.items():
            for part in order:
                # Without a maximum there are no values.
                if part not in stored and "max" in stored:
                    parts = {other: self._matrix(name, other)[cells] for other in with_stand_ins((part,))}
                    self._matrix(name, part)[cells] = implied(part, parts)

    def of(self, name: str, part: str) -> Float64s:
        statistic = _bare(name)
        if statistic not in DERIVED:
            return self._matrix(name, part)
        terms = {
            term: {other: self._matrix(_column(term), other) for other in needed(statistic, (part,))}
            for term in sources(statistic)
        }
        computed = from_terms(statistic, terms, part)
        own = self._own.get(name)
        return computed if own is None else np.where(own, self._matrix(name, part), computed)

    def _matrix(self, name: str, part: str) -> Float64s:
        key = (name, part)
        if key not in self._values:
            self._values[key] = np.full((len(self._tensors), self._count), BLANK[part])
        return self._values[key]


def _spread(series: memoryview | bytes, buckets: int, shift: int, out: Float64s) -> None:
    """Decode a series into the requested buckets."""
    low, high = max(shift, 0), min(shift + buckets, len(out))
    if low >= high:
        return
    if low == shift and high == shift + buckets:
        decode_into(series, out[low:high])
        return
    whole = np.empty(buckets)
    decode_into(series, whole)
    out[low:high] = whole[low - shift : high - shift]


def _uncover_stale(
    covered: NDArray[np.bool_],
    first: int,
    stride: int,
    state: tuple[Any, ...],
    cutoffs: dict[int, int],
    raw_from: int,
) -> None:
    """Uncover the buckets beyond the rolled-up steps, and those with late rows."""
    until, stale_first, stale_last, stored = state
    until = min(until, first_difference(known_cutoffs(stored), cutoffs))
    covered[max(until // stride - first, 0) :] = False
    if stale_first is not None and stale_last >= raw_from:
        stale_first = max(stale_first, raw_from)
        covered[max(stale_first // stride - first, 0) : max(stale_last // stride + 1 - first, 0)] = False


def known_cutoffs(text: str) -> dict[int, int]:
    """Parse the cutoffs stored in Rolling."""
    return {int(attempt): step for attempt, step in json.loads(text).items()}


def first_difference(a: dict[int, int], b: dict[int, int]) -> int:
    """The first step that counts differently under two sets of cutoffs, rounded down to a bucket."""
    different = [
        step
        for attempt in a.keys() | b.keys()
        if a.get(attempt) != b.get(attempt)
        for step in (a.get(attempt), b.get(attempt))
        if step is not None
    ]
    return min(different, default=EVERY_STEP) // FINEST * FINEST


def _bare(name: str) -> str:
    return name.removeprefix("tensor:")


def _column(statistic: str) -> str:
    return f"tensor:{statistic}"
