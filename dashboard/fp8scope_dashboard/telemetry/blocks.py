"""Write blocks: chunks into a block, and blocks into a larger block, within the transaction of the caller.

Decodes one statistic at a time, so that memory holds the rows of one statistic rather than of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import SCALAR, TENSOR, ChunkData, Float64s, Int64s, decode
from fp8scope_dashboard.telemetry.models import Block, Chunk, Tile
from fp8scope_dashboard.telemetry.rows import AXES, AXIS, SEQS, STEPS, TIMES
from fp8scope_dashboard.telemetry.tile_codec import (
    WIDTH,
    cut_tile,
    decode_integers,
    decode_matrix,
    decode_series,
    encode_integers,
    encode_matrix,
    encode_series,
    encode_tile,
)

Encoded = tuple[list[int], bytes]


@dataclass(frozen=True)
class Rows:
    """The steps, times and seqs of the rows of a block, in the order in which they were sent.

    `order` maps each row to its index in the concatenated parts; None if they are already in order.
    """

    steps: Int64s
    times: NDArray[np.datetime64]
    seqs: Int64s
    order: Int64s | None

    @classmethod
    def of(cls, steps: Int64s, times: NDArray[np.datetime64], seqs: Int64s) -> Rows:
        if (np.diff(seqs) >= 0).all():
            return cls(steps, times, seqs, None)
        order = np.argsort(seqs, kind="stable")
        return cls(steps[order], times[order], seqs[order], order)


def from_chunks(chunks: Sequence[Chunk], catalogue: Int64s) -> Block:
    """Move the chunks of one writer, ordered by seq, into a new block."""
    bare = [decode(chunk.body, scalars=(), statistics=()) for chunk in chunks]
    rows = Rows.of(
        np.concatenate([data.steps for data in bare]),
        np.concatenate([data.times for data in bare]),
        np.concatenate([_seqs(data, chunk.seq) for data, chunk in zip(bare, chunks, strict=True)]),
    )
    run_id, writer = chunks[0].run_id, chunks[0].writer
    Chunk.objects.filter(run_id=run_id, writer=writer, seq__in=[chunk.seq for chunk in chunks]).delete()
    return _write(chunks, rows, _tiles_of_chunks(chunks, bare, catalogue, rows))


def from_blocks(blocks: Sequence[Block]) -> Block:
    """Replace blocks of one writer, ordered by seq, by a single block."""
    run_id, writer = blocks[0].run_id, blocks[0].writer
    stored = Tile.objects.filter(run_id=run_id, writer=writer, seq__in=[block.seq for block in blocks])
    axes: dict[int, list[memoryview]] = {
        seq: cut_tile(offsets, body, AXES)
        for seq, offsets, body in stored.filter(name=AXIS).values_list("seq", "offsets", "body")
    }
    steps, times, seqs = (
        np.concatenate([decode_integers(axes[block.seq][axis], block.rows) for block in blocks])
        for axis in (STEPS, TIMES, SEQS)
    )
    rows = Rows.of(steps, times.view("datetime64[us]"), seqs)
    names = list(stored.exclude(name=AXIS).order_by("name", "tile").values_list("name", "tile").distinct())
    # The new block has the smallest seq of the old ones, so they are deleted before it is written.
    tiles = [(name, tile, _rewritten(stored, blocks, rows, name, tile)) for name, tile in names]
    stored.delete()
    Block.objects.filter(run_id=run_id, writer=writer, seq__in=[block.seq for block in blocks]).delete()
    return _write(blocks, rows, iter(tiles))


def _rewritten(stored: Any, blocks: Sequence[Block], rows: Rows, name: str, tile: int) -> Encoded | None:
    parts = {
        seq: (offsets, body)
        for seq, offsets, body in stored.filter(name=name, tile=tile).values_list("seq", "offsets", "body")
    }
    if name.startswith(SCALAR):
        return _joined_scalar([(block.rows, parts.get(block.seq)) for block in blocks], rows)
    values = np.full((WIDTH, len(rows.steps)), np.nan)
    begin = 0
    for block in blocks:
        if block.seq in parts:
            decode_matrix(*parts[block.seq], values[:, begin : begin + block.rows])
        begin += block.rows
    return encode_matrix(values if rows.order is None else values[:, rows.order])


def _joined_scalar(parts: list[tuple[int, Encoded | None]], rows: Rows) -> Encoded | None:
    decoded = [decode_series(b"" if part is None else part[1], count) for count, part in parts]
    return _scalar_tile(
        np.concatenate([values for values, _ in decoded]),
        np.concatenate([present for _, present in decoded]),
        rows,
    )


def _tiles_of_chunks(
    chunks: Sequence[Chunk], bare: list[ChunkData], catalogue: Int64s, rows: Rows
) -> Iterator[tuple[str, int, Encoded | None]]:
    names: set[str] = set()
    for chunk in chunks:
        with pa.ipc.open_stream(pa.py_buffer(chunk.body)) as reader:
            names.update(reader.schema.names)
    scalars = [name.removeprefix(SCALAR) for name in sorted(names) if name.startswith(SCALAR)]
    decoded = [decode(chunk.body, scalars=scalars, statistics=()) for chunk in chunks] if scalars else []
    for name in scalars:
        nothing = [(np.full(len(data), np.nan), np.zeros(len(data), bool)) for data in bare]
        values = np.concatenate([d.scalars.get(name, n[0]) for d, n in zip(decoded, nothing, strict=True)])
        present = np.concatenate([d.logged.get(name, n[1]) for d, n in zip(decoded, nothing, strict=True)])
        yield SCALAR + name, 0, _scalar_tile(values, present, rows)
    del decoded
    for name in sorted(names):
        if name.startswith(TENSOR):
            matrix = _matrix(chunks, bare, name.removeprefix(TENSOR))
            if rows.order is not None:
                matrix = matrix[rows.order]
            for tile, encoded in _tensor_tiles(matrix, catalogue):
                yield name, tile, encoded


def _matrix(chunks: Sequence[Chunk], bare: list[ChunkData], name: str) -> Float64s:
    """One statistic of all chunks: float64[rows, largest width]."""
    parts = [decode(chunk.body, scalars=(), statistics=(name,)).statistics.get(name) for chunk in chunks]
    widths = {part.shape[1] for part in parts if part is not None}
    if len(widths) == 1 and all(part is not None for part in parts):
        return np.concatenate([part for part in parts if part is not None])
    matrix = np.full((sum(map(len, bare)), max(widths)), np.nan)
    begin = 0
    for part, data in zip(parts, bare, strict=True):
        if part is not None:
            matrix[begin : begin + len(data), : part.shape[1]] = part
        begin += len(data)
    return matrix


def _tensor_tiles(matrix: Float64s, catalogue: Int64s) -> Iterator[tuple[int, Encoded | None]]:
    """Encode the columns of a writer as tiles of the run."""
    indices = catalogue[: matrix.shape[1]]
    for tile in np.unique(indices // WIDTH).tolist():
        columns = np.flatnonzero(indices // WIDTH == tile)
        values = np.full((WIDTH, len(matrix)), np.nan)
        values[indices[columns] % WIDTH] = matrix[:, columns].T
        yield tile, encode_matrix(values)


def _scalar_tile(values: Float64s, present: NDArray[np.bool_], rows: Rows) -> Encoded | None:
    if rows.order is not None:
        values, present = values[rows.order], present[rows.order]
    return encode_tile([encode_series(values, present)])


def _seqs(data: ChunkData, seq: int) -> Int64s:
    return np.full(len(data), seq, np.int64) if data.seqs is None else data.seqs


def _write(
    parts: Sequence[Chunk] | Sequence[Block], rows: Rows, tiles: Iterator[tuple[str, int, Encoded | None]]
) -> Block:
    run_id, writer, seq = parts[0].run_id, parts[0].writer, parts[0].seq
    received: datetime = max(part.received_at for part in parts)
    block = Block(
        run_id=run_id,
        writer=writer,
        seq=seq,
        last_seq=max(part.last_seq for part in parts),
        first_step=min(part.first_step for part in parts),
        last_step=max(part.last_step for part in parts),
        rows=len(rows.steps),
        points=sum(part.points for part in parts),
        received_at=received,
    )
    block.save(force_insert=True)
    axis = encode_tile(
        [encode_integers(column) for column in (rows.steps, rows.times.astype(np.int64), rows.seqs)]
    )
    sql.write(
        """
        INSERT INTO telemetry_tile (run_id, name, tile, writer, seq, offsets, body)
        VALUES (%s, %s, %s, %s, %s, %s, %s)
        """,
        (
            (run_id, name, tile, writer, seq, *encoded)
            for name, tile, encoded in chain([(AXIS, 0, axis)], tiles)
            if encoded is not None
        ),
    )
    return block
