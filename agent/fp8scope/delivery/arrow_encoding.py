"""Encodes rows as one Arrow record batch, in the format of docs/wire.md.

The encoding is deterministic: a message that is rebuilt after a crash has the same bytes. The server thereby
recognises a repeated message even if another process sends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8scope.delivery.arrow_stream import ArrowColumn, write_stream
from fp8scope.recording.records import ExponentHistograms, Row

PROTOCOL = 1

CONTENT_TYPE = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The body of a message. `points` counts the non-null values, without `step` and `time`."""

    body: bytes
    rows: int
    points: int


def encode_batch(
    rows: Sequence[Row], statistics: Sequence[str], *, run: str, writer: str, seq: int
) -> EncodedBatch:
    """Encode `rows`; `statistics` names the columns of their matrices.

    There must be at least one row, and the steps must not decrease.
    """
    if not rows:
        raise ValueError("A batch needs at least one row.")
    step = np.array([row.step for row in rows], np.int64)
    time = np.array([row.time_us for row in rows], np.int64)
    columns = [
        ArrowColumn(name="step", type="int64", values=step, nullable=False),
        ArrowColumn(name="time", type="time", values=time, nullable=False),
    ]
    points = 0
    for name in dict.fromkeys(name for row in rows for name in row.scalars):
        missing = np.array([name not in row.scalars for row in rows])
        values = np.array([row.scalars.get(name, 0.0) for row in rows])
        points += len(values) - int(np.count_nonzero(missing))
        columns.append(ArrowColumn(name=f"scalar:{name}", type="float64", values=values, missing=missing))
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
            filled = np.where(missing, 0.0, values)
            columns.append(ArrowColumn(name=f"tensor:{name}", type="float64", values=filled, missing=missing))
    metadata = {**_metadata(run, writer, seq), "fp8scope.dropped": str(rows[-1].dropped)}
    return EncodedBatch(write_stream(columns, metadata), len(rows), points)


def _metadata(run: str, writer: str, seq: int) -> dict[str, str]:
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


def encode_histograms(histograms: ExponentHistograms, *, run: str, writer: str, seq: int) -> bytes:
    """Encode the body of POST /runs/{run}/histograms: one row per tensor."""
    number = len(histograms.counts)
    steps = np.full(number, histograms.step, np.int64)
    times = np.full(number, histograms.time_us, np.int64)
    columns = [
        ArrowColumn(name="step", type="int64", values=steps, nullable=False),
        ArrowColumn(name="time", type="time", values=times, nullable=False),
        ArrowColumn(name="tensor", type="int32", values=histograms.tensors, nullable=False),
        ArrowColumn(name="counts", type="float64", values=histograms.counts, nullable=False),
    ]
    return write_stream(columns, _metadata(run, writer, seq))
