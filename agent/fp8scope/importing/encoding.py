"""Encodes tables as batches of docs/wire.md, straight from their columns."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fp8scope.delivery.arrow_encoding import PROTOCOL
from fp8scope.delivery.arrow_stream import ArrowColumn, write_stream
from fp8scope.importing.limits import CELLS_OF_A_TABLE
from fp8scope.importing.model import ValueTable


@dataclass(frozen=True)
class EncodedTable:
    """The columns of a message, without its number. `points` counts the values."""

    columns: list[ArrowColumn]
    rows: int
    points: int

    def body(self, run: str, writer: str, seq: int) -> bytes:
        """Return the Arrow stream."""
        metadata = {"protocol": PROTOCOL, "run": run, "writer": writer, "seq": seq}
        return write_stream(self.columns, {f"fp8scope.{key}": str(value) for key, value in metadata.items()})


def encode(table: ValueTable, base_time_us: int) -> EncodedTable:
    """Return a table as a batch; `base_time_us` is the time of rows that have none."""
    times = np.full(len(table), base_time_us, np.int64) if table.times is None else table.times
    columns = [
        ArrowColumn(name="step", type="int64", values=np.ascontiguousarray(table.steps), nullable=False),
        ArrowColumn(name="time", type="time", values=np.ascontiguousarray(times), nullable=False),
    ]
    points = 0
    for name, values in table.scalars.items():
        missing = table.missing.get(name)
        if missing is None:
            missing = np.zeros(len(values), np.bool_)
        points += len(values) - int(np.count_nonzero(missing))
        columns.append(ArrowColumn(name=f"scalar:{name}", type="float64", values=values, missing=missing))
    for name, matrix in table.statistics.items():
        missing = np.isnan(matrix)
        points += matrix.size - int(np.count_nonzero(missing))
        filled = np.where(missing, 0.0, matrix)
        columns.append(ArrowColumn(name=f"tensor:{name}", type="float64", values=filled, missing=missing))
    return EncodedTable(columns, len(table), points)


def in_parts(table: ValueTable) -> Iterator[ValueTable]:
    """Yield a table in parts that the server takes: it bounds the values of a message."""
    width = len(table.scalars) + sum(matrix.shape[1] for matrix in table.statistics.values())
    length = max(1, CELLS_OF_A_TABLE // max(1, width))
    for first in range(0, len(table), length):
        part = slice(first, first + length)
        yield replace(
            table,
            steps=table.steps[part],
            times=None if table.times is None else table.times[part],
            scalars={name: values[part] for name, values in table.scalars.items()},
            missing={name: values[part] for name, values in table.missing.items()},
            statistics={name: values[part] for name, values in table.statistics.items()},
        )
