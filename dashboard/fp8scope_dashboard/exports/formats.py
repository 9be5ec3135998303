"""An export as bytes: Parquet or CSV, written piece by piece into memory that is emptied as it fills."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv

from fp8scope_dashboard.exports.content import MOST_CELLS, Content
from fp8scope_dashboard.exports.spreadsheet import escape_json, json_text, safe_header
from fp8scope_dashboard.telemetry.codec import TENSOR

Format = Literal["parquet", "csv"]
MEDIA_TYPES: Final[dict[Format, str]] = {
    "parquet": "application/vnd.apache.parquet",
    "csv": "text/csv; charset=utf-8",
}
# The file's metadata key (Parquet), or the beginning of its first line (CSV), before the description as JSON.
KEY: Final = "fp8scope"

# Of a row group, before compression; one piece more than that at most.
GROUP_BYTES: Final = 8 * MOST_CELLS

OnRows = Callable[[int], None]


def write(content: Content, form: Format, on_rows: OnRows = lambda rows: None) -> Iterator[bytes]:
    """The file's bytes; `on_rows` is told how many rows have been written so far.

    Histograms are in a Parquet file only: as text each would be 279 numbers, most of them 0.
    """
    return _parquet(content, on_rows) if form == "parquet" else _csv(content, on_rows)


class _Pail(io.RawIOBase):
    """A file that is written to, and emptied."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def empty(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _parquet(content: Content, on_rows: OnRows) -> Iterator[bytes]:
    # Here, and not above: it takes a tenth of the time that a process takes to start.
    from pyarrow import parquet

    pail = _Pail()
    schema = content.schema.with_metadata({KEY: json.dumps(content.description)})
    rows = 0
    with pa.PythonFile(pail, mode="w") as sink:
        writer = parquet.ParquetWriter(sink, schema, compression="zstd")
        for group in _gathered(content):
            writer.write_table(group, row_group_size=group.num_rows)
            rows += group.num_rows
            on_rows(rows)
            yield pail.empty()
        writer.close()
        yield pail.empty()


def _gathered(content: Content) -> Iterator[pa.Table]:
    """Small pieces (a run that is not compacted has many) put together, for row groups worth their header."""
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


def _csv(content: Content, on_rows: OnRows) -> Iterator[bytes]:
    """A line with the description, a header, the rows: a column for each statistic of each tensor."""
    pail = _Pail()
    yield f"#{KEY} {json_text(content.description)}\n".encode()
    schema = _flat_schema(content)
    rows = 0
    # A file object is all it needs; the stubs know of fewer kinds.
    with pa.PythonFile(pail, mode="w") as sink, pa.csv.CSVWriter(cast("Any", sink), schema) as writer:
        for piece in content.pieces():
            writer.write_batch(_flat(piece, schema, len(content.tensors)))
            rows += piece.num_rows
            on_rows(rows)
            yield pail.empty()
    yield pail.empty()


def _flat_schema(content: Content) -> pa.Schema:
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
            # Documents, as JSON.
            texts = [None if text is None else escape_json(text) for text in column.to_pylist()]
            columns.append(pa.array(texts, pa.string()))
        elif not name.startswith(TENSOR):
            columns.append(column)
        elif column.null_count:
            # All rows of a piece have the statistic, or none has.
            columns += [pa.nulls(len(column), pa.float64())] * tensors
        else:
            values = cast("pa.ListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
            matrix = values.reshape(len(column), tensors)
            columns += [pa.array(each, mask=np.isnan(each)) for each in matrix.T]
    return pa.record_batch(columns, schema=schema)
