"""Write an export as Parquet or CSV, piece by piece in bounded memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv

from fp8scope_dashboard.exports.content import MAX_CELLS, ExportContent
from fp8scope_dashboard.exports.spreadsheet import escape_json, json_text, safe_header
from fp8scope_dashboard.telemetry.codec import TENSOR

Format = Literal["parquet", "csv"]
MEDIA_TYPES: Final[dict[Format, str]] = {
    "parquet": "application/vnd.apache.parquet",
    "csv": "text/csv; charset=utf-8",
}
# Before the description as JSON: the key in the file's metadata (Parquet), the start of the first line (CSV).
KEY: Final = "fp8scope"

# Size of a row group before compression; it exceeds this by less than one piece.
GROUP_BYTES: Final = 8 * MAX_CELLS

OnRows = Callable[[int], None]


def write(content: ExportContent, form: Format, on_rows: OnRows = lambda rows: None) -> Iterator[bytes]:
    """The bytes of the file. Calls `on_rows` with the number of rows written so far.

    Histograms and media are in Parquet files only: as text, a histogram would be 279 numbers, most of them 0.
    """
    return _parquet(content, on_rows) if form == "parquet" else _csv(content, on_rows)


class _Buffer(io.RawIOBase):
    """A file in memory from which the written bytes are taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _parquet(content: ExportContent, on_rows: OnRows) -> Iterator[bytes]:
    # Heavy: at the top it would take a tenth of the start time of every process.
    from pyarrow import parquet

    buffer = _Buffer()
    schema = content.schema.with_metadata({KEY: json.dumps(content.description)})
    rows = 0
    with pa.PythonFile(buffer, mode="w") as sink:
        writer = parquet.ParquetWriter(sink, schema, compression="zstd")
        for group in _gathered(content):
            writer.write_table(group, row_group_size=group.num_rows)
            rows += group.num_rows
            on_rows(rows)
            yield buffer.take()
        writer.close()
        yield buffer.take()


def _gathered(content: ExportContent) -> Iterator[pa.Table]:
    """Combine small pieces, of which an uncompacted run has many, into row groups of a useful size."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for piece in content.pieces():
        waiting.append(piece)
        size += piece.nbytes
        if size >= GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _csv(content: ExportContent, on_rows: OnRows) -> Iterator[bytes]:
    """A line with the description, a header, and rows with one column per statistic and tensor."""
    buffer = _Buffer()
    yield f"#{KEY} {json_text(content.description)}\n".encode()
    schema = _flat_schema(content)
    rows = 0
    # CSVWriter accepts any file object; the type stubs list fewer types.
    with pa.PythonFile(buffer, mode="w") as sink, pa.csv.CSVWriter(cast("Any", sink), schema) as writer:
        for piece in content.pieces():
            writer.write_batch(_flat(piece, schema, len(content.tensors)))
            rows += piece.num_rows
            on_rows(rows)
            yield buffer.take()
    yield buffer.take()


def _flat_schema(content: ExportContent) -> pa.Schema:
    fields: list[pa.Field[Any]] = []
    for field in content.schema:
        if field.name.startswith(TENSOR):
            names = (safe_header(f"{field.name}:{name}") for name in content.tensors)
            fields += [pa.field(name, pa.float64()) for name in names]
        else:
            fields.append(field)
    return pa.schema(fields)


def _flat(piece: pa.RecordBatch, schema: pa.Schema, tensors: int) -> pa.RecordBatch:
    columns: list[pa.Array[Any]] = []
    for name, column in zip(piece.schema.names, piece.columns, strict=True):
        if column.type == pa.string():
            # Documents in JSON.
            texts = [None if text is None else escape_json(text) for text in column.to_pylist()]
            columns.append(pa.array(texts, pa.string()))
        elif not name.startswith(TENSOR):
            columns.append(column)
        elif column.null_count:
            # Either all rows of a piece have the statistic or none has.
            columns += [pa.nulls(len(column), pa.float64())] * tensors
        else:
            values = cast("pa.ListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
            matrix = values.reshape(len(column), tensors)
            columns += [pa.array(column, mask=np.isnan(column)) for column in matrix.T]
    return pa.record_batch(columns, schema=schema)
