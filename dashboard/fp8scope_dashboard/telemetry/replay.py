"""Read every row of a writer once, in sending order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from uuid import UUID

import numpy as np
from django.db import connection, transaction
from django.db.models import QuerySet

from fp8scope_dashboard.runs.models import Writer
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, ChunkData, Float64s, Int64s, decode
from fp8scope_dashboard.telemetry.cold.bodies import with_bodies
from fp8scope_dashboard.telemetry.models import Block, Chunk, Tile
from fp8scope_dashboard.telemetry.rows import AXES, AXIS, SEQS, STEPS, TIMES
from fp8scope_dashboard.telemetry.tile_codec import WIDTH, cut_tile, decode_integers, decode_series

# Cells (rows x columns) of one piece of a block: 64 MB.
MAX_CELLS = 8_000_000
# Compaction may move data between finding and reading it, but never this often in a row.
MAX_TRIES = 100


def contiguous_until(run_id: UUID, writer: UUID, start: int = 0) -> int:
    """The first seq from `start` on that this writer has not sent yet."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT max(seq) + 1 FROM (
                SELECT seq, row_number() OVER (ORDER BY seq) - 1 + %s AS expected
                FROM ingest_receipt WHERE run_id = %s AND writer = %s AND seq >= %s
            ) AS arrived WHERE seq = expected
            """,
            [start, run_id, writer, start],
        )
        row = cursor.fetchone()
    return start if row is None or row[0] is None else int(row[0])


def stream(
    run_id: UUID,
    writer: UUID,
    next_seq: int,
    limit: int,
    *,
    until: int = 2**63 - 1,
    scalars: Collection[str] | None = None,
    statistics: Collection[str] | None = None,
) -> list[tuple[int, ChunkData]]:
    """Read the messages next_seq..until - 1 of a writer, in order, as up to `limit` pieces.

    Each piece comes with the seq of its last message; continue at that + 1. Reads only the named columns, if
    given. Compaction changes how rows are cut into pieces, but not the rows or their order. Evaluations use
    seqs too, so a missing seq need not be a missing batch; see `contiguous_until`.
    """
    for _ in range(MAX_TRIES):
        with suppress(_MovedError):
            reader = _Reader(
                run_id=run_id,
                writer=writer,
                next_seq=next_seq,
                until=until,
                scalars=scalars,
                statistics=statistics,
            )
            return list(islice(reader.pieces(limit), limit))
    raise RuntimeError("The store changed during every attempt to read it.")


class _MovedError(Exception):
    """Compaction has moved the data between finding and reading it."""


@dataclass(frozen=True, kw_only=True)
class _Reader:
    run_id: UUID
    writer: UUID
    next_seq: int
    until: int
    scalars: Collection[str] | None
    statistics: Collection[str] | None

    def pieces(self, limit: int) -> Iterator[tuple[int, ChunkData]]:
        for group in self._overlapping(limit):
            if len(group) == 1 and not group[0].is_block:
                data = self._cut(self._chunk(group[0].seq))
            elif len(group) == 1:
                yield from self._block_pieces(group[0])
                continue
            else:
                # The seq of a late batch lies within the range of another: sort the rows of both.
                data = self._cut(in_order([self._whole(item) for item in group]))
            if len(data):
                yield _last_seq(data), data

    def _overlapping(self, limit: int) -> list[list[_Item]]:
        """Blocks and chunks by seq, grouped where their ranges overlap."""
        with connection.cursor() as cursor:
            cursor.execute(
                """
                SELECT seq, last_seq, true FROM telemetry_block
                WHERE run_id = %(run)s AND writer = %(writer)s AND last_seq >= %(first)s AND seq < %(until)s
                UNION ALL
                SELECT seq, last_seq, false FROM telemetry_chunk
                WHERE run_id = %(run)s AND writer = %(writer)s AND last_seq >= %(first)s AND seq < %(until)s
                ORDER BY 1
                """,
                {"run": self.run_id, "writer": self.writer, "first": self.next_seq, "until": self.until},
            )
            groups: list[list[_Item]] = []
            end = -1
            for row in cursor:
                item = _Item(*row)
                if item.seq > end:
                    if len(groups) == limit:
                        break
                    groups.append([])
                groups[-1].append(item)
                end = max(end, item.last_seq)
        return groups

    def _chunk(self, seq: int) -> ChunkData:
        chunk = Chunk.objects.filter(run_id=self.run_id, writer=self.writer, seq=seq)
        body = chunk.values_list("body", flat=True).first()
        if body is None:
            raise _MovedError
        data = decode(body, scalars=self.scalars, statistics=self.statistics)
        return data if data.seqs is not None else replace(data, seqs=np.full(len(data), seq, np.int64))

    def _whole(self, item: _Item) -> ChunkData:
        return next(self._read(item.seq, whole=True)) if item.is_block else self._chunk(item.seq)

    def _block_pieces(self, item: _Item) -> Iterator[tuple[int, ChunkData]]:
        for data in self._read(item.seq, whole=False):
            yield _last_seq(data), data

    def _read(self, seq: int, *, whole: bool) -> Iterator[ChunkData]:
        """Read the rows of a block, in pieces cut between messages."""
        block = Block.objects.filter(run_id=self.run_id, writer=self.writer, seq=seq).first()
        tiles = Tile.objects.filter(run_id=self.run_id, writer=self.writer, seq=seq)
        axis = tiles.filter(name=AXIS).first()
        if block is None or axis is None:
            raise _MovedError
        series = cut_tile(axis.offsets, axis.body, AXES)
        steps, times, seqs = (decode_integers(series[i], block.rows) for i in (STEPS, TIMES, SEQS))
        catalogue = Writer.objects.values_list("catalogue", flat=True).get(
            run_id=self.run_id, uuid=self.writer
        )
        names = sorted({name for name in tiles.values_list("name", flat=True) if self._wants(name)})
        low, high = (0, len(seqs)) if whole else np.searchsorted(seqs, [self.next_seq, self.until]).tolist()
        width = max(1, sum(len(catalogue) if name.startswith(TENSOR) else 1 for name in names))
        for begin, end in _cuts(seqs, low, high, high if whole else max(1, MAX_CELLS // width)):
            chosen = slice(begin, end)
            data = ChunkData(
                steps=steps[chosen],
                times=times[chosen].view("datetime64[us]"),
                scalars={},
                logged={},
                statistics={},
                seqs=seqs[chosen],
            )
            yield self._filled(data, tiles.filter(name__in=names), block.rows, chosen, np.asarray(catalogue))

    def _filled(
        self, data: ChunkData, tiles: QuerySet[Tile], rows: int, chosen: slice, catalogue: Int64s
    ) -> ChunkData:
        scalars: dict[str, Float64s] = {}
        logged = {}
        statistics: dict[str, Float64s] = {}
        stored = tiles.values_list("name", "tile", "offsets", "body", "location")
        with transaction.atomic(using=stored.db):
            for name, tile, offsets, body in with_bodies(self.run_id, stored.iterator(16)):
                if name.startswith(SCALAR):
                    values, present = decode_series(body, rows)
                    key = name.removeprefix(SCALAR)
                    scalars[key], logged[key] = values[chosen], present[chosen]
                    continue
                matrix = statistics.setdefault(
                    name.removeprefix(TENSOR), np.full((len(data), len(catalogue)), np.nan)
                )
                series = cut_tile(offsets, body, WIDTH)
                for column in np.flatnonzero(catalogue // WIDTH == tile).tolist():
                    matrix[:, column] = decode_series(series[catalogue[column] % WIDTH], rows)[0][chosen]
        return replace(data, scalars=scalars, logged=logged, statistics=statistics)

    def _wants(self, name: str) -> bool:
        if name.startswith(SCALAR):
            return self.scalars is None or name.removeprefix(SCALAR) in self.scalars
        if name.startswith(TENSOR):
            return self.statistics is None or name.removeprefix(TENSOR) in self.statistics
        return False

    def _cut(self, data: ChunkData) -> ChunkData:
        assert data.seqs is not None
        inside = (data.seqs >= self.next_seq) & (data.seqs < self.until)
        return data if inside.all() else data.rows(inside)


@dataclass(frozen=True)
class _Item:
    seq: int
    last_seq: int
    is_block: bool


def in_order(parts: Sequence[ChunkData]) -> ChunkData:
    """Concatenate the rows of all parts and sort them by seq. Missing columns have no values."""
    scalars = sorted(set().union(*(part.scalars for part in parts)))
    statistics = sorted(set().union(*(part.statistics for part in parts)))
    joined = ChunkData(
        steps=np.concatenate([part.steps for part in parts]),
        times=np.concatenate([part.times for part in parts]),
        scalars={
            n: np.concatenate([part.scalars.get(n, np.full(len(part), np.nan)) for part in parts])
            for n in scalars
        },
        logged={
            n: np.concatenate([part.logged.get(n, np.zeros(len(part), bool)) for part in parts])
            for n in scalars
        },
        statistics={n: _stack([part.statistics.get(n) for part in parts], parts) for n in statistics},
        seqs=np.concatenate([part.seqs for part in parts if part.seqs is not None]),
    )
    assert joined.seqs is not None
    return joined.rows(np.argsort(joined.seqs, kind="stable"))


def _stack(matrices: Sequence[Float64s | None], parts: Sequence[ChunkData]) -> Float64s:
    """float64[all rows, largest width], NaN if a part lacks the column."""
    width = max(matrix.shape[1] for matrix in matrices if matrix is not None)
    stacked = np.full((sum(map(len, parts)), width), np.nan)
    begin = 0
    for matrix, part in zip(matrices, parts, strict=True):
        if matrix is not None:
            stacked[begin : begin + len(part), : matrix.shape[1]] = matrix
        begin += len(part)
    return stacked


def _cuts(seqs: Int64s, low: int, high: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """Split rows into ranges of at most `max_rows`, cut between messages; a larger message is not split."""
    while low < high:
        end = high
        if high - low > max_rows:
            end = int(np.searchsorted(seqs, seqs[low + max_rows], side="left"))
            if end <= low:
                end = min(high, int(np.searchsorted(seqs, seqs[low], side="right")))
        yield low, end
        low = end


def _last_seq(data: ChunkData) -> int:
    assert data.seqs is not None
    return int(data.seqs[-1])
