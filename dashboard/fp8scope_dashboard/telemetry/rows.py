"""Read rows from blocks and chunks, writer by writer.

One SQL statement reads both, from one snapshot of the tables, so that a row which compaction moves meanwhile
is neither missed nor read twice. It fetches only the requested series of a tile, and the times of the rows,
which are most of the axis, only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, Float64s, Int64s, decode, extended
from fp8scope_dashboard.telemetry.cold.bodies import with_bodies
from fp8scope_dashboard.telemetry.rank_merge import RankRows
from fp8scope_dashboard.telemetry.tile_codec import cut_tile, decode_integers, decode_series, series_by_tile
from fp8scope_dashboard.telemetry.writers import EVERY_STEP, Interval, Source, sources_of

AXIS = "axis"
STEPS, TIMES, SEQS = 0, 1, 2
AXES = 3
NO_TIME = np.datetime64("NaT", "us")
# Results for up to this many series are held in memory; others are streamed.
FEW_SERIES = 4

# The rows are grouped by writer, in the order of `writers`, each with (writer, seq, last_seq, rows, name,
# tile, first position, offsets, body, location in the cold store). A block has its axis first, then the
# requested slices of its tiles. A chunk has one row with its body; its name is null, and its offsets are the
# length of the body. Without tensors among the columns, only the head of the body is read: the rest may be
# megabytes.
_WANTED = """
    WITH wanted (tile, low, high) AS (
        SELECT * FROM unnest(%(tiles)s::int[], %(lows)s::int[], %(highs)s::int[])
    )
"""
_STORED = """
    SELECT {run} writer, seq, last_seq, rows, name, tile, low,
        CASE WHEN untimed THEN
                ARRAY[offsets[1], offsets[2], offsets[2], offsets[2] + offsets[4] - offsets[3]]
            WHEN whole THEN offsets
            ELSE offsets[low + 1 : high + 2] END,
        CASE WHEN untimed THEN
                substring(body FROM 1 FOR offsets[2]) || substring(body FROM offsets[3] + 1)
            WHEN whole THEN body
            ELSE substring(body FROM offsets[low + 1] + 1 FOR offsets[high + 2] - offsets[low + 1]) END,
        location
    FROM (
        SELECT {run_of_block} b.writer, b.seq, b.last_seq, b.rows, t.name, t.tile, w.low, w.high, t.offsets,
            t.body, w.low IS NULL OR cardinality(t.offsets) = 0 AS whole,
            t.name = 'axis' AND cardinality(t.offsets) > 0 AND NOT %(timed)s AS untimed, t.location
        FROM telemetry_block b
        JOIN telemetry_tile t ON t.run_id = b.run_id AND t.writer = b.writer AND t.seq = b.seq
        {of_block}
        LEFT JOIN wanted w ON w.tile = t.tile AND t.name <> 'axis'
        WHERE {within_block}
            AND t.name = ANY(%(columns)s::text[]) AND t.tile = ANY(%(tiles)s::int[] || 0)
            AND (t.name = 'axis' OR w.tile IS NOT NULL)
            AND (%(writer)s::uuid IS NULL OR b.writer = %(writer)s) AND b.last_seq >= %(next_seq)s
        UNION ALL
        SELECT {run_of_chunk} c.writer, c.seq, c.last_seq, c.rows, NULL, NULL, NULL, NULL,
            ARRAY[octet_length(c.body)],
            CASE WHEN %(scalars)s AND c.head IS NOT NULL THEN substring(c.body FROM 1 FOR c.head)
                ELSE c.body END,
            true, false, NULL
        FROM telemetry_chunk c
        {of_chunk}
        WHERE {within_chunk}
            AND (%(writer)s::uuid IS NULL OR c.writer = %(writer)s) AND c.last_seq >= %(next_seq)s
        {order}
    ) AS stored
"""
_INTERVALS = """
    {name}.run_id = %(run)s AND EXISTS (
        SELECT FROM unnest(%(firsts)s::bigint[], %(lasts)s::bigint[]) AS i (low, high)
        WHERE {name}.last_step >= i.low AND {name}.first_step <= i.high)
"""
_ASKED = """
    JOIN unnest(%(runs)s::uuid[], %(firsts)s::bigint[], %(lasts)s::bigint[]) AS asked (run, first, last)
        ON asked.run = {name}.run_id AND {name}.last_step >= asked.first AND {name}.first_step <= asked.last
"""
_OF_ONE = _STORED.format(
    run="", run_of_block="", run_of_chunk="", of_block="", of_chunk="", order="ORDER BY 1, 2 OFFSET 0",
    within_block=_INTERVALS.format(name="b") + " AND t.run_id = %(run)s",
    within_chunk=_INTERVALS.format(name="c"),
)  # fmt: skip
STATEMENT = f"""
    {_WANTED}
    {_OF_ONE}
    LEFT JOIN unnest(%(writers)s::uuid[]) WITH ORDINALITY AS known (writer, position) USING (writer)
    ORDER BY position, seq, name <> 'axis'
"""
# The rows of several runs, each with its run in front, in any order of the runs and their writers. All parts
# join by the run, so that in a distributed store each node answers for its own runs.
OF_RUNS = _WANTED + _STORED.format(
    run="run_id,", run_of_block="b.run_id,", run_of_chunk="c.run_id,", order="",
    of_block=_ASKED.format(name="b"), of_chunk=_ASKED.format(name="c"),
    within_block="true", within_chunk="true",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """The requested columns and rows.

    Attributes:
        names: column names on the wire.
        tensors: int64[T] of Tensor.index, for tensor columns.
        between: intervals of steps, sorted and disjoint.
        timed: whether to read the times; otherwise they may be NaT, which is faster.
    """

    run_id: UUID
    names: tuple[str, ...]
    tensors: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    between: tuple[Interval, ...] = ((0, EVERY_STEP),)
    timed: bool = True


@dataclass(kw_only=True)
class Segment:
    """Rows of one block or chunk.

    Attributes:
        span: the first and the last message.
        seqs: returns the message of each row, int64[R]; rarely needed.
        values: float64[T, R] per name; T is 1 for scalars.
        logged: bool[R] per scalar, whether the row has a value.
    """

    span: tuple[int, int]
    seqs: Callable[[], Int64s]
    steps: Int64s
    times: NDArray[np.datetime64]
    values: dict[str, Float64s]
    logged: dict[str, NDArray[np.bool_]]


def tensor_parts(
    run_id: UUID,
    statistics: Sequence[str],
    tensors: Int64s,
    *between: Interval,
    sources: Mapping[UUID, Source] | None = None,
    timed: bool = True,
) -> Iterator[RankRows]:
    """Read statistics of tensors over intervals of steps: one part per writer, float64[T, R] by name.

    `known` are the writers of the run, if already read. `timed` is as in `Wanted`.
    """
    wanted = Wanted(run_id, tuple(TENSOR + name for name in statistics), tensors, between, timed)
    for source, segment in _by_writer(wanted, sources):
        values = {name: segment.values[TENSOR + name] for name in statistics}
        yield RankRows(source.rank, source.order, segment.steps, segment.times, values)


def scalar_parts(
    run_id: UUID,
    name: str,
    *between: Interval,
    sources: Mapping[UUID, Source] | None = None,
    timed: bool = True,
) -> Iterator[RankRows]:
    """Read the rows of a scalar that have a value, float64[R]. Otherwise as `tensor_parts`."""
    for parts in scalars_parts(run_id, (name,), *between, sources=sources, timed=timed):
        yield parts[name]


def scalars_parts(
    run_id: UUID,
    names: Sequence[str],
    *between: Interval,
    sources: Mapping[UUID, Source] | None = None,
    timed: bool = True,
) -> Iterator[dict[str, RankRows]]:
    """Read several scalars at once: for each writer, the part of each scalar. Otherwise as `scalar_parts`."""
    columns = tuple(SCALAR + name for name in names)
    wanted = Wanted(run_id, columns, between=between, timed=timed)
    return _scalars_of(_by_writer(wanted, sources), names)


def _scalars_of(
    segments: Iterator[tuple[Source, Segment]], names: Sequence[str]
) -> Iterator[dict[str, RankRows]]:
    for source, segment in segments:
        parts = {}
        for name in names:
            column = SCALAR + name
            logged: NDArray[np.bool_] | slice = segment.logged[column]
            if segment.logged[column].all():
                logged = slice(None)  # a view instead of a copy
            values = {name: segment.values[column][0, logged]}
            parts[name] = RankRows(
                source.rank, source.order, segment.steps[logged], segment.times[logged], values
            )
        yield parts


def scalar_parts_of_runs(
    name: str,
    intervals: Mapping[UUID, Interval],
    sources: Mapping[UUID, Mapping[UUID, Source]],
    *,
    timed: bool = True,
) -> dict[UUID, list[RankRows]]:
    """Read a scalar of several runs, each over one interval of steps, by one statement; see `scalar_parts`.

    All rows are in memory at once.
    """
    columns = (SCALAR + name,)
    firsts, lasts = zip(*intervals.values(), strict=True)
    parameters = {
        **_parameters(Wanted(next(iter(intervals)), columns, timed=timed)),
        "runs": list(intervals),
        "firsts": [max(first, 0) for first in firsts],
        "lasts": [min(last, EVERY_STEP) for last in lasts],
    }
    by_run: dict[UUID, list[tuple[Any, ...]]] = {run_id: [] for run_id in intervals}
    # Scalars are never in the cold store.
    for run_id, *row, _ in sql.fetch(OF_RUNS, parameters):
        by_run[run_id].append(tuple(row))
    parts = {}
    for run_id, rows in by_run.items():
        writers = {writer: order for order, writer in enumerate(sources[run_id])}
        rows.sort(key=lambda row: (writers.get(row[0], len(writers)), row[0], row[1], row[4] != AXIS))
        wanted = Wanted(run_id, columns, between=(intervals[run_id],), timed=timed)
        parts[run_id] = [
            part[name] for part in _scalars_of(_segments(iter(rows), wanted, sources[run_id]), (name,))
        ]
    return parts


def _by_writer(wanted: Wanted, sources: Mapping[UUID, Source] | None) -> Iterator[tuple[Source, Segment]]:
    if sources is None:
        sources = sources_of(wanted.run_id)
    only = next(iter(sources)) if len(sources) == 1 else None
    return _segments(_fetch(wanted, list(sources), only), wanted, sources)


def _segments(
    rows: Iterator[tuple[Any, ...]], wanted: Wanted, sources: Mapping[UUID, Source]
) -> Iterator[tuple[Source, Segment]]:
    """The rows of a statement, decoded and joined by writer."""
    for writer, mine in groupby(rows, key=lambda row: row[0]):
        if writer not in sources:  # created after the writers were read
            continue
        source = sources[writer]
        segments = []
        for _, block in groupby(mine, key=lambda row: row[1]):
            segment = read_segment(list(block), wanted, source)
            if len(segment.steps):
                segments.append(segment)
        if segments:
            yield source, join(segments)


def _fetch(
    wanted: Wanted, writers: list[UUID], writer: UUID | None = None, next_seq: int = -1
) -> Iterator[tuple[Any, ...]]:
    parameters = {**_parameters(wanted, writer, next_seq), "writers": writers}
    few = len(wanted.tensors) <= FEW_SERIES
    rows = iter(sql.fetch(STATEMENT, parameters)) if few else sql.stream(STATEMENT, parameters)
    return with_bodies(wanted.run_id, rows)


def _parameters(wanted: Wanted, writer: UUID | None = None, next_seq: int = -1) -> dict[str, Any]:
    tiles = series_by_tile(wanted.tensors)
    return {
        "run": wanted.run_id,
        "columns": [AXIS, *wanted.names],
        "firsts": [max(first, 0) for first, _ in wanted.between],
        "lasts": [min(last, EVERY_STEP) for _, last in wanted.between],
        "tiles": list(tiles),
        "lows": [series.low for series in tiles.values()],
        "highs": [series.high for series in tiles.values()],
        "writer": writer,
        "next_seq": next_seq,
        "timed": wanted.timed,
        "scalars": not any(name.startswith(TENSOR) for name in wanted.names),
    }


def read_segment(rows: list[tuple[Any, ...]], wanted: Wanted, source: Source) -> Segment:
    """Decode the requested rows of a block or chunk, up to where a later attempt replaces the writer."""
    if rows[0][4] is None:
        return _read_chunk(rows[0], wanted, source)
    _, seq, last_seq, count, _, _, _, offsets, axis = rows[0]
    series = cut_tile(offsets, axis, AXES)
    steps = decode_integers(series[STEPS], count)
    chosen = _chosen(steps, wanted.between, source.until)
    inside = steps[chosen]
    if wanted.timed:
        times = decode_integers(series[TIMES], count)[chosen].view("datetime64[us]")
    else:
        times = np.broadcast_to(NO_TIME, inside.shape)
    segment = _blank(
        wanted, (seq, last_seq), lambda: decode_integers(series[SEQS], count)[chosen], inside, times
    )
    if not len(segment.steps):
        return segment
    tiles = series_by_tile(wanted.tensors)
    for _, _, _, _, name, tile, low, offsets, body in rows[1:]:
        bodies = cut_tile(offsets, body, tiles[tile].high - low + 1, low)
        for position, row in tiles[tile].cells:
            values, present = _decode_chosen(bodies[position], count, chosen)
            segment.values[name][row] = values
            if name in segment.logged:
                segment.logged[name] = present
    return segment


def _decode_chosen(
    body: memoryview, count: int, chosen: slice | NDArray[np.bool_]
) -> tuple[Float64s, NDArray[np.bool_]]:
    values, present = decode_series(body, count)
    return values[chosen], present[chosen]


def _blank(
    wanted: Wanted,
    span: tuple[int, int],
    seqs: Callable[[], Int64s],
    steps: Int64s,
    times: NDArray[np.datetime64],
) -> Segment:
    values, logged = {}, {}
    for name in wanted.names:
        is_scalar = name.startswith(SCALAR)
        values[name] = np.full((1 if is_scalar else len(wanted.tensors), len(steps)), np.nan)
        if is_scalar:
            logged[name] = np.zeros(len(steps), bool)
    return Segment(span=span, seqs=seqs, steps=steps, times=times, values=values, logged=logged)


def _read_chunk(row: tuple[Any, ...], wanted: Wanted, source: Source) -> Segment:
    seq, last_seq, body = row[1], row[2], row[8]
    data = decode(
        extended(body, row[7][0]),
        scalars={name.removeprefix(SCALAR) for name in wanted.names if name.startswith(SCALAR)},
        statistics={name.removeprefix(TENSOR) for name in wanted.names if name.startswith(TENSOR)},
    )
    chosen = _chosen(data.steps, wanted.between, source.until)
    seqs = np.full(len(data), seq, np.int64) if data.seqs is None else data.seqs
    segment = _blank(wanted, (seq, last_seq), lambda: seqs[chosen], data.steps[chosen], data.times[chosen])
    for name, values in data.scalars.items():
        segment.values[SCALAR + name][0] = values[chosen]
        segment.logged[SCALAR + name] = data.logged[name][chosen]
    for name, values in data.statistics.items():
        column_of = np.full(int(max(source.catalogue.max(initial=0), wanted.tensors.max(initial=0))) + 1, -1)
        column_of[source.catalogue[: values.shape[1]]] = np.arange(
            min(values.shape[1], len(source.catalogue))
        )
        columns = column_of[wanted.tensors]
        stored = columns >= 0
        segment.values[TENSOR + name][stored] = values[chosen][:, columns[stored]].T
    return segment


def _chosen(steps: Int64s, between: Sequence[Interval], until: int) -> slice | NDArray[np.bool_]:
    """Select the rows of these steps below `until`; a slice if the steps are sorted, as is usual."""
    if len(between) == 1 and (steps[1:] >= steps[:-1]).all():
        ((first, last),) = between
        return slice(*np.searchsorted(steps, [first, min(last + 1, until)]))
    chosen = np.zeros(len(steps), bool)
    for first, last in between:
        chosen |= (steps >= first) & (steps <= last)
    return chosen & (steps < until)


def join(segments: list[Segment]) -> Segment:
    """Join segments of one writer in sending order."""
    if len(segments) == 1:
        return segments[0]
    joined = Segment(
        span=(segments[0].span[0], max(segment.span[1] for segment in segments)),
        seqs=lambda: np.concatenate([segment.seqs() for segment in segments]),
        steps=np.concatenate([segment.steps for segment in segments]),
        times=np.concatenate([segment.times for segment in segments]),
        values={
            n: np.concatenate([segment.values[n] for segment in segments], axis=1) for n in segments[0].values
        },
        logged={n: np.concatenate([segment.logged[n] for segment in segments]) for n in segments[0].logged},
    )
    # The rows of each segment are already in order.
    if all(before.span[1] < after.span[0] for before, after in pairwise(segments)):
        return joined
    seqs = joined.seqs()
    order = np.argsort(seqs, kind="stable")
    return Segment(
        span=joined.span,
        seqs=lambda: seqs[order],
        steps=joined.steps[order],
        times=joined.times[order],
        values={name: values[:, order] for name, values in joined.values.items()},
        logged={name: logged[order] for name, logged in joined.logged.items()},
    )
