"""Reads a file of `fp8scope export`: the description of the run, and its rows cut into messages.

docs/operating.md lists the columns. The file is untrusted input: malformed content raises a TransferError
that says what is wrong.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa

from fp8scope.importing.posting import TransferError

FORMATS = (1, 2, 3, 4, 5)
# The first format with alerts.
FIRST_WITH_ALERTS = 3
KEY = "fp8scope"
REQUIRED = {"id", "run", "rows", "tensors", "catalogues", "writers"}
# Values in one message: 8 MiB of float64.
MAX_CELLS = 1 << 20
BLOCK = 64 << 20
# Bins of a histogram, see docs/wire.md.
BINS = 279
INTEGERS = {"writer": pa.int32(), "seq": pa.int64(), "step": pa.int64()}
# Columns that mark a row as a document instead of a step.
DOCUMENTS = ("evaluation", "report", "alert", "command", "console", "note", "artefact", "media")
HISTOGRAM = "histogram"
CONTENT = "content"
# The server quotes a column name, or a part of one, that a spreadsheet would read as a formula.
QUOTE = re.compile(r"(?:^|(?<=[,;\t\r\n]))'(?='*[=+\-@\t\r])")

PartKind = Literal[
    "rows", "evaluation", "report", "alert", "command", "console", "note", "artefact", "media", "histogram"
]


@dataclass(frozen=True)
class MessageRows:
    """The rows of one message. `writer` is an index into the writers of the description."""

    writer: int
    kind: PartKind
    rows: pa.RecordBatch

    def document(self) -> dict[str, Any]:
        """Return the JSON object of an evaluation, a report, an alert, a command or a media."""
        try:
            document = json.loads(self.rows.column(self.kind)[0].as_py())
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise TransferError(f"the file is damaged: its {self.kind} is not a JSON object")
        return document

    def content(self) -> bytes:
        """Return the content of a media; empty if an earlier row has it. Raises TransferError if none can."""
        if CONTENT not in self.rows.schema.names or self.rows.schema.field(CONTENT).type != pa.binary():
            raise TransferError("the file is damaged: its media have no content")
        return bytes(self.rows.column(CONTENT)[0].as_py() or b"")

    def step(self) -> int:
        """Return the step of the first row."""
        return int(self.rows.column("step")[0].as_py())

    def counts(self) -> "pa.Array[Any]":
        """Return the counts of all histograms, concatenated."""
        column = cast("pa.ListArray[Any]", self.rows.column(HISTOGRAM))
        kind = column.type
        if (
            not pa.types.is_list(kind)
            or kind.value_type != pa.float64()
            or (column.value_lengths().to_numpy(zero_copy_only=False) != BINS).any()
        ):
            raise TransferError(f"the file is damaged: a histogram does not have {BINS} numbers")
        return column.flatten()

    def tensors(self, indexes: Mapping[int, int]) -> Any:
        """Return int32 catalogue indexes of the histograms' tensors; `indexes` maps them from the run's."""
        tensors = self.rows.column("tensor").to_pylist()
        if unknown := [tensor for tensor in tensors if tensor not in indexes]:
            raise TransferError(
                f"the file is damaged: tensor {unknown[0]} of a histogram was not watched by its process"
            )
        return np.array([indexes[int(tensor)] for tensor in tensors if tensor is not None], np.int32)


class Archive:
    """An exported run in a Parquet or CSV file. `description` is the JSON that describes the run.

    Raises:
        TransferError: the file is not an export, or has a newer format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._csv = file.read(len(KEY) + 1) == f"#{KEY}".encode()
        text = self._first_line() if self._csv else self._footer()
        try:
            self.description: dict[str, Any] = json.loads(text)
            version = self.description["format"]
        except (ValueError, KeyError, TypeError):
            raise TransferError(f"{path} was not written by `fp8scope export`") from None
        if version not in FORMATS:
            raise TransferError(
                f"{path} has format {version}; this fp8scope reads up to {FORMATS[-1]}: update it"
            )
        if missing := REQUIRED - self.description.keys():
            raise TransferError(f"{path} is damaged: its description has no {', '.join(sorted(missing))}")

    @property
    def has_alerts(self) -> bool:
        """Return whether the format contains the run's alerts."""
        return bool(self.description["format"] >= FIRST_WITH_ALERTS)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(int(self.description.get(count, 0)) for count in ("rows", "documents", "histograms"))

    def parts(self, cells: int) -> Iterator[MessageRows]:
        """Yield the messages; `cells` is the maximum number of values in a row of the run."""
        for batch in self._record_batches():
            self._check(batch)
            yield from _cut(batch, cells)

    def _first_line(self) -> bytes:
        with self.path.open("rb") as file:
            return file.readline().partition(b" ")[2]

    def _footer(self) -> bytes:
        from pyarrow import parquet

        try:
            return (parquet.read_schema(self.path).metadata or {}).get(KEY.encode(), b"")
        except pa.ArrowInvalid:
            return b""

    def _record_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows. In a CSV file, each statistic of each tensor is a column."""
        if self._csv:
            yield from self._read_csv()
        else:
            from pyarrow import parquet

            yield from parquet.ParquetFile(self.path).iter_batches(batch_size=4096)

    def _read_csv(self) -> Iterator[pa.RecordBatch]:
        from pyarrow import csv

        with self.path.open("rb") as file:
            file.readline()
            header = next(iter(csv.open_csv(file, csv.ReadOptions(block_size=BLOCK)))).schema.names
        types: dict[str, pa.DataType] = {name: pa.float64() for name in header}
        types |= INTEGERS | {name: pa.string() for name in DOCUMENTS}
        types["time"] = pa.timestamp("us", tz="UTC")
        convert = csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
        names = [QUOTE.sub("", name) for name in header]
        with self.path.open("rb") as file:
            file.readline()
            for batch in csv.open_csv(file, csv.ReadOptions(block_size=BLOCK), convert_options=convert):
                yield batch.rename_columns(names)

    def _check(self, batch: pa.RecordBatch) -> None:
        for name, integer in INTEGERS.items():
            if name not in batch.schema.names or batch.schema.field(name).type != integer:
                raise TransferError(f"{self.path} is damaged: it has no column {name} of {integer}")
            if batch.column(name).null_count:
                raise TransferError(f"{self.path} is damaged: a row has no {name}")
        if HISTOGRAM in batch.schema.names and "tensor" not in batch.schema.names:
            raise TransferError(f"{self.path} is damaged: its histograms have no tensor")
        writers = batch.column("writer").to_numpy()
        writer_count = len(self.description["writers"])
        if len(writers) and not 0 <= writers.min() <= writers.max() < writer_count:
            raise TransferError(f"{self.path} is damaged: it has rows of a process that it does not describe")


def _cut(batch: pa.RecordBatch, cells: int) -> Iterator[MessageRows]:
    """Cut rows into messages as the agent does: one writer each, with steps that do not decrease.

    A message with very many histograms becomes several messages.
    """
    kinds: tuple[PartKind, ...] = get_args(PartKind)
    codes = _codes(batch, kinds)
    writers, seqs, steps = (batch.column(name).to_numpy() for name in ("writer", "seq", "step"))
    sampled = codes[1:] == kinds.index("histogram")
    ends = (np.diff(writers) != 0) | (np.diff(codes) != 0) | (np.diff(steps) < 0)
    ends |= sampled & ((np.diff(seqs) != 0) | (np.diff(steps) != 0))
    ends |= np.isin(codes[1:], [kinds.index(name) for name in DOCUMENTS])
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(steps)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        for start in range(begin, end, most := _rows_of_a_message(kinds[codes[begin]], cells)):
            yield MessageRows(
                int(writers[start]), kinds[codes[start]], batch.slice(start, min(most, end - start))
            )


def _codes(batch: pa.RecordBatch, kinds: tuple[PartKind, ...]) -> Any:
    """Return the kind of each row: int8 indexes into `kinds`."""
    codes = np.zeros(batch.num_rows, np.int8)
    for code, name in enumerate(kinds):
        if code and name in batch.schema.names:
            codes[batch.column(name).is_valid().to_numpy(zero_copy_only=False)] = code
    return codes


def _rows_of_a_message(kind: PartKind, cells: int) -> int:
    return max(1, MAX_CELLS // (BINS if kind == HISTOGRAM else max(1, cells)))
