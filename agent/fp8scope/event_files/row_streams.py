"""Rows of one writer, made of values, and cut into messages at the server's position."""

import uuid
from typing import Final

import numpy as np

from fp8scope.delivery.arrow_encoding import EncodedBatch, encode_batch
from fp8scope.event_files.log_run import PlacedValue
from fp8scope.recording.records import Row

MAX_ROWS: Final = 4_096
MAX_CELLS: Final = 400_000
"""Rows times scalars of a message."""
_NOTHING: Final = np.zeros((0, 0))


class RowStream:
    """The rows of one writer of a run.

    Attributes:
        writer: its id, computed from the run and the name of the stream: equal in each process.
        seq: the number of its next message.
        rows, points: what the server has stored of it.
    """

    def __init__(self, run: uuid.UUID, value: PlacedValue) -> None:
        self.writer = str(uuid.uuid5(run, value.where.stream))
        self.attempt = value.where.attempt
        self.is_late = value.where.is_late
        self.seq = self.rows = self.points = 0
        self._begins_at = value.where.begins_at
        self._skip = 0
        self._waiting: list[Row] = []
        self._names: set[str] = set()
        self._scalars: dict[str, float] = {}
        self._step = -1

    def resume(self, *, seq: int, rows: int, points: int) -> None:
        """Begin behind what the server has: as many values are passed over."""
        self.seq, self.rows, self.points, self._skip = seq, rows, points, points

    @property
    def is_full(self) -> bool:
        """Return whether the waiting rows are as many as a message takes."""
        rows = len(self._waiting)
        return rows >= MAX_ROWS or rows * len(self._names) >= MAX_CELLS

    def add(self, value: PlacedValue) -> bool:
        """Add a value to the row of its step. Returns False if the server has it."""
        if self._skip:
            self._skip = max(0, self._skip - len(value.names))
            return False
        if (
            value.step != self._step
            or not self._waiting
            or any(name in self._scalars for name in value.names)
        ):
            self._begin_row(value)
        for name in value.names:
            self._scalars[name] = value.value
            self._names.add(name)
        return True

    def _begin_row(self, value: PlacedValue) -> None:
        if not self.points and not self._waiting and self.attempt and self._begins_at < value.step:
            # The attempt replaces earlier ones from its beginning on, also where it has no value.
            self._waiting.append(self._row(self._begins_at, value.time_us, {}))
        self._step, self._scalars = value.step, {}
        self._waiting.append(self._row(value.step, value.time_us, self._scalars))

    @staticmethod
    def _row(step: int, time_us: int, scalars: dict[str, float]) -> Row:
        return Row(step=step, time_us=time_us, dropped=0, scalars=scalars, statistics=_NOTHING)

    def take(self) -> list[Row]:
        """Return the waiting rows, sorted by step, and empty the stream."""
        rows, self._waiting, self._names, self._step = self._waiting, [], set(), -1
        return sorted(rows, key=lambda row: row.step) if self.is_late else rows

    def encode(self, run: uuid.UUID, rows: list[Row]) -> EncodedBatch:
        """The next message, with these rows."""
        return encode_batch(rows, (), run=str(run), writer=self.writer, seq=self.seq)

    def acknowledge(self, batch: EncodedBatch) -> None:
        """The server has stored a message."""
        self.seq += 1
        self.rows += batch.rows
        self.points += batch.points
