"""Build roll-ups from rows, and larger buckets from smaller ones, in the transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

import numpy as np

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.aggregates import (
    BLANK,
    FACTOR,
    FINEST,
    PARTS,
    STRIDES,
    Parts,
    aggregate,
    blank,
    combine,
    same_from_terms,
    spare,
    unite,
)
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, Float64s, Int64s
from fp8scope_dashboard.telemetry.rank_merge import DERIVED, across_ranks, derive, first_of_each_step, sources
from fp8scope_dashboard.telemetry.rollups import read
from fp8scope_dashboard.telemetry.rollups.read import SPAN
from fp8scope_dashboard.telemetry.tile_codec import WIDTH, encode_matrix, encode_series, encode_tile

Named = dict[str, Parts]
# Values of one tile that are read at a time: 64 MB.
MAX_CELLS = 8_000_000
# Larger buckets are built once there are this many of them; below that, the smaller ones are few enough.
MIN_BUCKETS = 32


def write(run: Run, cutoffs: dict[int, int], stored: int, raw_from: int, first: int, last: int) -> None:
    """Roll up the steps first..last - 1 (multiples of FINEST), and the larger buckets that they complete.

    Args:
        cutoffs: the current cutoffs; see `writers.cutoffs`.
        stored: all steps below this are already rolled up.
        raw_from: raw tensor values below this step may be deleted, so late rows are added to the roll-ups.
    """
    until = max(stored, last)
    table = _RollUpTable(run.id, cutoffs)
    fresh = _finest(run, first, last)
    tiles = []
    for tile, named in fresh:
        if tile[0] == TENSOR:
            table.add(tile, first // FINEST, named, min(last, stored, raw_from) // FINEST)
        table.put(tile, FINEST, first // FINEST, named, stored // FINEST)
        tiles.append(tile)
    for fine in STRIDES[:-1]:
        stride = fine * FACTOR
        if until // stride < MIN_BUCKETS:
            _forget(run.id, stride)
            return
        for low, high in _completed(stride, stored, first, last):
            for tile, names in _tiles_names(tiles, run):
                children = table.get(tile, names, fine, low * FACTOR, high * FACTOR)
                named = {name: combine(parts, fine) for name, parts in children.items()}
                table.put(tile, stride, low, named, stored // stride)


def _completed(stride: int, stored: int, first: int, last: int) -> Iterable[tuple[int, int]]:
    """The larger buckets, as (first, end), that are complete once the steps first..last - 1 are."""
    until = max(stored, last)
    low, high = first // stride, min(-(-last // stride), until // stride)
    if stored // stride < MIN_BUCKETS and min(low, stored // stride):
        # There were too few until now: build all.
        yield 0, min(low, stored // stride)
    if low < high:
        yield low, high


def forget_from(run_id: UUID, step: int) -> None:
    """Delete the rows of the table that begin at this step or later."""
    statement = "DELETE FROM telemetry_rollup WHERE run_id = %s AND span * %s * stride >= %s"
    sql.write(statement, [(run_id, SPAN, step)])


def _forget(run_id: UUID, stride: int) -> None:
    """Delete buckets of `stride` or more steps, of a run that has become too short for them."""
    sql.write("DELETE FROM telemetry_rollup WHERE run_id = %s AND stride >= %s", [(run_id, stride)])


def _tiles_names(tiles: Iterable[tuple[str, int]], run: Run) -> Iterable[tuple[tuple[str, int], list[str]]]:
    """The columns of each group; see `_finest`."""
    for group in tiles:
        yield group, _columns(run) if group[0] == TENSOR else [group[0]]


def _columns(run: Run) -> list[str]:
    """The tensor columns of a run; derived ones come last."""
    stored = list(run.statistics)
    derived = [name for name in DERIVED if set(sources(name)) <= set(stored)]
    return [TENSOR + name for name in (*stored, *derived)]


def _finest(run: Run, first: int, last: int) -> Iterable[tuple[tuple[str, int], Named]]:
    """Yield the finest buckets by group: the axis, each scalar, and each tile of all tensor columns."""
    yield (rows.AXIS, 0), {rows.AXIS: _axis(run.id, first, last)}
    for name in sorted(run.last_scalars):
        yield (SCALAR + name, 0), {SCALAR + name: _scalar(run.id, name, first, last)}
    tensors = Tensor.objects.filter(run=run).count() if run.statistics else 0
    for tile in range(-(-tensors // WIDTH)):
        indices = np.arange(tile * WIDTH, min((tile + 1) * WIDTH, tensors))
        pieces = [_tensors(run, indices, *steps) for steps in _pieces(run, first, last)]
        named = {column: _concatenate([piece.pop(column) for piece in pieces]) for column in _columns(run)}
        yield (TENSOR, tile), named


def _pieces(run: Run, first: int, last: int) -> Iterable[tuple[int, int]]:
    """Split the steps first..last - 1 into pieces of at most MAX_CELLS values of a tile."""
    steps = MAX_CELLS // (WIDTH * max(1, len(run.statistics)))
    size = max(FINEST, steps // FINEST * FINEST)
    for begin in range(first, last, size):
        yield begin, min(last, begin + size)


def _tensors(run: Run, indices: Int64s, first: int, last: int) -> Named:
    """The finest buckets of all columns of some tensors."""
    bucket, count = first // FINEST, (last - first) // FINEST
    merged = across_ranks(rows.tensor_parts(run.id, run.statistics, indices, (first, last - 1)))
    if merged is None or not len(merged.steps):
        return {column: blank(len(indices), count) for column in _columns(run)}
    return {
        column: aggregate(
            merged.steps, derive(column.removeprefix(TENSOR), merged.values), FINEST, bucket, count
        )
        for column in _columns(run)
    }


def _concatenate(pieces: list[Parts]) -> Parts:
    """Concatenate the buckets of all pieces."""
    return {part: np.concatenate([piece[part] for piece in pieces], axis=1) for part in PARTS}


def _scalar(run_id: UUID, name: str, first: int, last: int) -> Parts:
    """The finest buckets of a scalar. Empty buckets replace values of an earlier attempt."""
    bucket, count = first // FINEST, (last - first) // FINEST
    parts = list(rows.scalar_parts(run_id, name, (first, last - 1)))
    if not parts:
        return blank(1, count)
    merged = first_of_each_step(parts)
    return aggregate(merged.steps, merged.values[name][None], FINEST, bucket, count, nan_is_value=True)


def _axis(run_id: UUID, first: int, last: int) -> Parts:
    """The time of the last row of each bucket, in microseconds since 1970."""
    bucket, count = first // FINEST, (last - first) // FINEST
    steps: Int64s = np.zeros(0, np.int64)
    times: Float64s = np.zeros(0)
    for part in rows.tensor_parts(run_id, (), np.zeros(0, np.int64), (first, last - 1)):
        steps = np.concatenate([steps, part.steps])
        times = np.concatenate([times, part.times.astype(np.int64).astype(np.float64)])
    order = np.argsort(steps, kind="stable")
    return aggregate(steps[order], times[order][None], FINEST, bucket, count)


class _RollUpTable:
    """Reads and writes roll-ups by group; see `_finest`."""

    def __init__(self, run_id: UUID, cuts: dict[int, int]) -> None:
        self._run_id, self._cutoffs = run_id, cuts
        # The number of series of each group.
        self._series: dict[tuple[str, int], int] = {}

    def get(self, group: tuple[str, int], names: list[str], stride: int, first: int, end: int) -> Named:
        """Read the buckets first..end - 1."""
        kind, tile = group
        if kind == rows.AXIS:
            rolled = read.read(
                self._run_id, [], np.zeros(0, np.int64), stride, first, end - 1, (), self._cutoffs
            )
            parts = blank(1, end - first)
            has_time = ~np.isnat(rolled.times)
            parts["last"][0, has_time] = rolled.times[has_time].astype(np.int64)
            parts["count"][0, has_time] = 1.0
            return {rows.AXIS: parts}
        indices = tile * WIDTH + np.arange(self._series[group])
        return read.read(self._run_id, names, indices, stride, first, end - 1, PARTS, self._cutoffs).values

    def add(self, group: tuple[str, int], first: int, named: Named, end: int) -> None:
        """Unite the finest buckets first..end - 1 with their stored values."""
        if first >= end:
            return
        self._series[group] = len(next(iter(named.values()))["count"])
        old = self.get(group, list(named), FINEST, first, end)
        for name, parts in named.items():
            head = {part: array[:, : end - first] for part, array in parts.items()}
            for part, array in unite(old[name], head).items():
                parts[part][:, : end - first] = array

    def put(self, group: tuple[str, int], stride: int, first: int, named: Named, stored: int) -> None:
        """Write buckets from `first` on, keeping the other stored buckets before `stored`."""
        kind, tile = group
        self._series[group] = len(next(iter(named.values()))["count"])
        end = first + next(iter(named.values()))["count"].shape[1]
        for span in range(first // SPAN, (end - 1) // SPAN + 1):
            low, high = max(first, span * SPAN), min(end, (span + 1) * SPAN)
            limit = min(max(stored, high), (span + 1) * SPAN)
            whole = {
                name: {part: array[:, low - first : high - first] for part, array in parts.items()}
                for name, parts in named.items()
            }
            if low > span * SPAN or limit > high:
                old = self.get(group, list(named), stride, span * SPAN, limit)
                for name, parts in whole.items():
                    for part, array in old[name].items():
                        # Clear the gap before the new buckets, which may have values of an earlier attempt.
                        array[:, max(stored - span * SPAN, 0) : low - span * SPAN] = BLANK[part]
                        array[:, low - span * SPAN : high - span * SPAN] = parts[part]
                whole = old
            self._write_span(kind, tile, stride, span, limit - span * SPAN, whole)

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
    """Encode the parts of a column; None for parts that need not be stored."""
    if kind == rows.AXIS:
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
    # The count of a derived statistic marks that it has its own rows.
    spared = spare(parts) - ({"count"} if statistic in DERIVED else set())
    width = WIDTH if kind == TENSOR else 1
    return {part: None if part in spared else encode_matrix(array, width) for part, array in parts.items()}
