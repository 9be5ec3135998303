"""Encode and decode chunks.

A chunk is an Arrow IPC stream with the columns of docs/wire.md. Merged chunks have an additional column,
`seq`, with the message of each row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SCALAR = "scalar:"
TENSOR = "tensor:"
STEP, TIME, SEQ = "step", "time", "seq"
TIME_TYPE = pa.timestamp("us", tz="UTC")
THREADS_FROM_BYTES = 1 << 20

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ChunkData:
    """Rows of one writer, in the order in which they were sent.

    Attributes:
        steps: int64[R].
        times: datetime64[us][R], UTC, the end of each step.
        scalars: float64[R] per name. NaN is either a logged value or no value; `logged` tells which.
        logged: bool[R] per scalar: whether the row has a value, including NaN.
        statistics: float64[R, n] per statistic; column j is entry j of the catalogue of the writer, NaN if
            not observed. n may differ between statistics and between chunks.
        seqs: int64[R], the message of each row; None if all rows come from the message of the chunk.
    """

    steps: Int64s
    times: NDArray[np.datetime64]
    scalars: Mapping[str, Float64s] = field(default_factory=dict)
    logged: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    statistics: Mapping[str, Float64s] = field(default_factory=dict)
    seqs: Int64s | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self, chosen: slice | NDArray[np.bool_] | Int64s) -> ChunkData:
        """Select rows by a slice, a mask or indices."""
        return ChunkData(
            steps=self.steps[chosen],
            times=self.times[chosen],
            scalars={name: values[chosen] for name, values in self.scalars.items()},
            logged={name: mask[chosen] for name, mask in self.logged.items()},
            statistics={name: values[chosen] for name, values in self.statistics.items()},
            seqs=None if self.seqs is None else self.seqs[chosen],
        )


def decode(
    body: bytes | memoryview,
    *,
    scalars: Collection[str] | None = None,
    statistics: Collection[str] | None = None,
) -> ChunkData:
    """Read a stored chunk, only the named scalars and statistics if given.

    Other columns are not decompressed. `body` must have been validated on arrival.
    """
    buffer = pa.py_buffer(body)
    wanted: list[int] | None = None
    if scalars is not None or statistics is not None:
        with pa.ipc.open_stream(buffer) as reader:
            names = reader.schema.names
        wanted = [i for i, name in enumerate(names) if _is_wanted(name, scalars, statistics)]
    # Threads are faster only for large buffers; most chunks have a few kilobytes.
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=len(buffer) > THREADS_FROM_BYTES)
    with pa.ipc.open_stream(buffer, options=options) as reader:
        return _from_batches(reader.schema.names, list(reader))


def extended(head: bytes | memoryview, length: int) -> bytes | memoryview:
    """A stored chunk of which only the head was read, as long as it was, to decode columns of the head."""
    if len(head) == length:
        return head
    # Arrow reads no buffer of another column. Zeros that nobody reads or writes take no memory.
    body = np.zeros(length, np.uint8)
    body[: len(head)] = np.frombuffer(head, np.uint8)
    return body.data


def encode(data: ChunkData, *, metadata: dict[str, str] | None = None) -> bytes:
    """Write a chunk with zstd-compressed buffers; the inverse of `decode`."""
    columns: dict[str, pa.Array[Any]] = {
        STEP: pa.array(data.steps, pa.int64()),
        TIME: pa.array(data.times.astype("datetime64[us]").astype(np.int64)).cast(TIME_TYPE),
    }
    if data.seqs is not None:
        columns[SEQ] = pa.array(data.seqs, pa.int64())
    for name, values in data.scalars.items():
        columns[SCALAR + name] = pa.array(values, pa.float64(), mask=~data.logged[name])
    for name, values in data.statistics.items():
        flat = np.ascontiguousarray(values).reshape(-1)
        observed = pa.array(flat, pa.float64(), mask=np.isnan(flat))
        columns[TENSOR + name] = _fixed_size_lists(observed, values.shape[1], len(data))
    fields = [
        pa.field(name, column.type, nullable=name.startswith((SCALAR, TENSOR)))
        for name, column in columns.items()
    ]
    schema = pa.schema(fields, metadata=cast("dict[bytes | str, bytes | str] | None", metadata))
    batch = pa.record_batch(list(columns.values()), schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _fixed_size_lists(values: pa.Array[Any], width: int, rows: int) -> pa.Array[Any]:
    list_type = pa.list_(pa.float64(), width)
    return pa.Array.from_buffers(list_type, rows, [None], children=[values])


def _is_wanted(name: str, scalars: Collection[str] | None, statistics: Collection[str] | None) -> bool:
    if name.startswith(SCALAR):
        return scalars is None or name.removeprefix(SCALAR) in scalars
    if name.startswith(TENSOR):
        return statistics is None or name.removeprefix(TENSOR) in statistics
    return True


def _from_batches(names: Sequence[str], batches: Sequence[pa.RecordBatch]) -> ChunkData:
    scalars: dict[str, Float64s] = {}
    logged: dict[str, NDArray[np.bool_]] = {}
    statistics: dict[str, Float64s] = {}
    plain: dict[str, NDArray[Any]] = {}
    for i, name in enumerate(names):
        column = _whole([batch.column(i) for batch in batches])
        if name.startswith(SCALAR):
            key = name.removeprefix(SCALAR)
            scalars[key], logged[key] = _scalar(column)
        elif name.startswith(TENSOR):
            statistics[name.removeprefix(TENSOR)] = _matrix(cast("pa.FixedSizeListArray[Any]", column))
        else:
            plain[name] = column.to_numpy(zero_copy_only=False)
    return ChunkData(
        steps=plain[STEP],
        times=plain[TIME],
        scalars=scalars,
        logged=logged,
        statistics=statistics,
        seqs=plain.get(SEQ),
    )


def _whole(parts: Sequence[pa.Array[Any]]) -> pa.Array[Any]:
    """Concatenate arrays, without a copy for a single record batch, as is usual."""
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _scalar(column: pa.Array[Any]) -> tuple[Float64s, NDArray[np.bool_]]:
    if not column.null_count:
        return column.to_numpy(), np.ones(len(column), bool)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return column.to_numpy(zero_copy_only=False), present


def _matrix(column: pa.FixedSizeListArray[Any]) -> Float64s:
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.astype(np.float64, copy=False).reshape(len(column), column.type.list_size)
