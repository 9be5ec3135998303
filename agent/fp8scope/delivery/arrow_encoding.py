"""Encodes rows as one Arrow record batch, in the format of docs/wire.md.

The encoding is deterministic: a message that is rebuilt after a crash has the same bytes. The server thereby
recognises a repeated message even if another process sends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8scope.recording.records import Histograms, Row

PROTOCOL = 1
AnyArray: TypeAlias = "pa.Array[Any]"

CONTENT_TYPE = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True, slots=True)
class Batch:
    """The body of a message. `points` counts the non-null values, without `step` and `time`."""

    body: bytes
    rows: int
    points: int


def encode_batch(rows: Sequence[Row], statistics: Sequence[str], *, run: str, writer: str, seq: int) -> Batch:
    """Encode `rows`; `statistics` names the columns of their matrices.

    There must be at least one row, and the steps must not decrease.
    """
    if not rows:
        raise ValueError("A batch needs at least one row.")
    step = np.array([row.step for row in rows], np.int64)
    time = np.array([row.time_us for row in rows], np.int64)
    fields: list[pa.Field[Any]] = [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
    columns = [_array(step, None, fields[0].type), _array(time, None, fields[1].type)]
    points = 0
    for name in dict.fromkeys(name for row in rows for name in row.scalars):
        missing = np.array([name not in row.scalars for row in rows])
        values = np.array([row.scalars.get(name, 0.0) for row in rows])
        points += len(values) - int(np.count_nonzero(missing))
        fields.append(pa.field(f"scalar:{name}", pa.float64()))
        columns.append(_array(values, missing, pa.float64()))
    tensors = max(len(row.statistics) for row in rows)
    if tensors:
        cube = _stack(rows, tensors, len(statistics))
        unobserved = cube[:, :, 0] == 0
        matrices = {name: np.where(unobserved, np.nan, cube[:, :, i]) for i, name in enumerate(statistics)}
        for name in dict.fromkeys(name for row in rows for name in row.extras):
            matrices[name] = _stack_extras(rows, name, tensors)
        for name, values in matrices.items():
            missing = np.isnan(values)
            points += values.size - int(np.count_nonzero(missing))
            column = _fixed_size_list(np.where(missing, 0.0, values), missing)
            fields.append(pa.field(f"tensor:{name}", column.type))
            columns.append(column)
    metadata = {**_metadata(run, writer, seq), "fp8scope.dropped": str(rows[-1].dropped)}
    schema = pa.schema(fields, metadata=metadata)
    return Batch(_serialise(schema, columns), len(rows), points)


def _metadata(run: str, writer: str, seq: int) -> dict[bytes | str, bytes | str]:
    return {
        "fp8scope.protocol": str(PROTOCOL),
        "fp8scope.run": run,
        "fp8scope.writer": writer,
        "fp8scope.seq": str(seq),
    }


def _stack(rows: Sequence[Row], tensors: int, width: int) -> NDArray[np.float64]:
    """Stack to float64 [rows, tensors, statistics]; tensors that a row does not have are 0 (not observed)."""
    cube = np.zeros((len(rows), tensors, width))
    for index, row in enumerate(rows):
        if len(row.statistics):
            cube[index, : len(row.statistics)] = row.statistics
    return cube


def _stack_extras(rows: Sequence[Row], name: str, tensors: int) -> NDArray[np.float64]:
    """Stack to float64 [rows, tensors]; NaN in rows that lack this statistic."""
    values = np.full((len(rows), tensors), np.nan)
    for index, row in enumerate(rows):
        if name in row.extras:
            values[index, : len(row.statistics)] = row.extras[name]
    return values


def encode_histograms(histograms: Histograms, *, run: str, writer: str, seq: int) -> bytes:
    """Encode the body of POST /runs/{run}/histograms: one row per tensor."""
    number, bins = histograms.counts.shape
    schema = pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("tensor", pa.int32(), nullable=False),
            pa.field("counts", pa.list_(pa.float64(), bins), nullable=False),
        ],
        metadata=_metadata(run, writer, seq),
    )
    counts = histograms.counts
    columns = [
        _array(np.full(number, histograms.step, np.int64), None, schema.field("step").type),
        _array(np.full(number, histograms.time_us, np.int64), None, schema.field("time").type),
        _array(histograms.tensors, None, pa.int32()),
        _fixed_size_list(counts, np.zeros(counts.shape, bool)),
    ]
    return _serialise(schema, columns)


def _array(values: NDArray[Any], missing: NDArray[np.bool_] | None, type: pa.DataType) -> AnyArray:
    """Build an Arrow array from a copy of NumPy's memory.

    `pa.array` is not used: its first call imports `pyarrow.compute`, and pandas if installed. That holds the
    GIL for about a second in a background thread, in the middle of the training.
    """
    validity = None
    if missing is not None and missing.any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little").tobytes())
    return pa.Array.from_buffers(type, values.size, [validity, pa.py_buffer(values.tobytes())])


def _fixed_size_list(values: NDArray[np.float64], missing: NDArray[np.bool_]) -> AnyArray:
    flat = _array(values.reshape(-1), missing.reshape(-1), pa.float64())
    rows, size = values.shape
    return pa.Array.from_buffers(pa.list_(pa.float64(), size), rows, [None], children=[flat])


def _serialise(schema: pa.Schema, columns: Sequence[AnyArray]) -> bytes:
    sink = pa.BufferOutputStream()
    # Do not use Arrow's thread pool, which has a thread per core: the training needs the cores.
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_stream(sink, schema, options=options) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(list(columns), schema=schema))
    return sink.getvalue().to_pybytes()
