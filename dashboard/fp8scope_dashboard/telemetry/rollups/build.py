"""Making roll-ups of rows, and larger buckets of smaller ones. Always within the caller's transaction."""

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
# Numbers of one tile that are read at once: 64 MB.
MOST_CELLS = 8_000_000
# A run has larger buckets from so many of them on: before, the smaller ones are few enough.
FEWEST_BUCKETS = 32


def write(run: Run, cutoffs: dict[int, int], stored: int, raw_from: int, first: int, last: int) -> None:
    """Roll up the steps first..last - 1 (multiples of FINEST), and the larger buckets that this completes.

    `cutoffs`: as in sources.cutoffs, those that count now. `stored`: all steps below have been rolled up.
    `raw_from`: of tensors below this there may be no rows any more, and what there is is added.
    """
    until = max(stored, last)
    work = _Work(run.id, cutoffs)
    fresh = _finest(run, first, last)
    tiles = []
    for tile, named in fresh:
        if tile[0] == TENSOR:
            work.add(tile, first // FINEST, named, min(last, stored, raw_from) // FINEST)
        work.put(tile, FINEST, first // FINEST, named, stored // FINEST)
        tiles.append(tile)
    for fine in STRIDES[:-1]:
        stride = fine * FACTOR
        if until // stride < FEWEST_BUCKETS:
            _forget(run.id, stride)
            return
        for low, high in _completed(stride, stored, first, last):
            for tile, names in _tiles_names(tiles, run):
                children = work.get(tile, names, fine, low * FACTOR, high * FACTOR)
                named = {name: combine(parts, fine) for name, parts in children.items()}
                work.put(tile, stride, low, named, stored // stride)


def _completed(stride: int, stored: int, first: int, last: int) -> Iterable[tuple[int, int]]:
    """The larger buckets, as (first, end), that are to be written now that the steps first..last - 1 are."""
    until = max(stored, last)
    low, high = first // stride, min(-(-last // stride), until // stride)
    if stored // stride < FEWEST_BUCKETS and min(low, stored // stride):
        # Too few until now: from the beginning.
        yield 0, min(low, stored // stride)
    if low < high:
        yield low, high


def forget_from(run_id: UUID, step: int) -> None:
    """Delete the rows of the table that begin at this step or later."""
    statement = "DELETE FROM telemetry_rollup WHERE run_id = %s AND span * %s * stride >= %s"
    sql.write(statement, [(run_id, SPAN, step)])


def _forget(run_id: UUID, stride: int) -> None:
    """No buckets so large, or larger: what there are were made when it was longer, or before this was so."""
    sql.write("DELETE FROM telemetry_rollup WHERE run_id = %s AND stride >= %s", [(run_id, stride)])


def _tiles_names(tiles: Iterable[tuple[str, int]], run: Run) -> Iterable[tuple[tuple[str, int], list[str]]]:
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
    yield (rows.AXIS, 0), {rows.AXIS: _axis(run.id, first, last)}
    for name in sorted(run.last_scalars):
        yield (SCALAR + name, 0), {SCALAR + name: _scalar(run.id, name, first, last)}
    tensors = Tensor.objects.filter(run=run).count() if run.statistics else 0
    for tile in range(-(-tensors // WIDTH)):
        indices = np.arange(tile * WIDTH, min((tile + 1) * WIDTH, tensors))
        pieces = [_tensors(run, indices, *steps) for steps in _pieces(run, first, last)]
        named = {column: _beside([piece.pop(column) for piece in pieces]) for column in _columns(run)}
        yield (TENSOR, tile), named


def _pieces(run: Run, first: int, last: int) -> Iterable[tuple[int, int]]:
    """The steps first..last - 1 in pieces, of which each has MOST_CELLS numbers of a tile at most."""
    steps = MOST_CELLS // (WIDTH * max(1, len(run.statistics)))
    size = max(FINEST, steps // FINEST * FINEST)
    for begin in range(first, last, size):
        yield begin, min(last, begin + size)


def _tensors(run: Run, indices: Int64s, first: int, last: int) -> Named:
    """Parts of the finest buckets of all columns of some tensors."""
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


def _beside(pieces: list[Parts]) -> Parts:
    """Parts of the buckets of all pieces."""
    return {part: np.concatenate([piece[part] for piece in pieces], axis=1) for part in PARTS}


def _scalar(run_id: UUID, name: str, first: int, last: int) -> Parts:
    """Parts of a scalar's finest buckets; blank ones, too: an earlier attempt may have had values there."""
    bucket, count = first // FINEST, (last - first) // FINEST
    parts = list(rows.scalar_parts(run_id, name, (first, last - 1)))
    if not parts:
        return blank(1, count)
    merged = first_of_each_step(parts)
    return aggregate(merged.steps, merged.values[name][None], FINEST, bucket, count, nan_is_value=True)


def _axis(run_id: UUID, first: int, last: int) -> Parts:
    """The time (us since 1970) of each bucket's last row."""
    bucket, count = first // FINEST, (last - first) // FINEST
    steps: Int64s = np.zeros(0, np.int64)
    times: Float64s = np.zeros(0)
    for part in rows.tensor_parts(run_id, (), np.zeros(0, np.int64), (first, last - 1)):
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
        if kind == rows.AXIS:
            found = read.read(
                self._run_id, [], np.zeros(0, np.int64), stride, first, end - 1, (), self._cutoffs
            )
            parts = blank(1, end - first)
            known = ~np.isnat(found.times)
            parts["last"][0, known] = found.times[known].astype(np.int64)
            parts["count"][0, known] = 1.0
            return {rows.AXIS: parts}
        indices = tile * WIDTH + np.arange(self._series[group])
        found = read.read(self._run_id, names, indices, stride, first, end - 1, PARTS, self._cutoffs)
        return found.values

    def add(self, group: tuple[str, int], first: int, named: Named, end: int) -> None:
        """Put into the finest buckets first..end - 1 what they have held before, too."""
        if first >= end:
            return
        self._series[group] = len(next(iter(named.values()))["count"])
        old = self.get(group, list(named), FINEST, first, end)
        for name, parts in named.items():
            head = {part: array[:, : end - first] for part, array in parts.items()}
            for part, array in unite(old[name], head).items():
                parts[part][:, : end - first] = array

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
                        # Between what is rolled up and these: nothing, but what an earlier attempt had.
                        array[:, max(stored - span * SPAN, 0) : low - span * SPAN] = BLANK[part]
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
    # A derived statistic's count says that it has rows of its own.
    spared = spare(parts) - ({"count"} if statistic in DERIVED else set())
    width = WIDTH if kind == TENSOR else 1
    return {part: None if part in spared else encode_matrix(array, width) for part, array in parts.items()}
