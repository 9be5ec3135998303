"""A run as `fp8scope export` has written it: what the file says of it, and its rows cut into messages.

docs/operating.md shows the columns. A file is what a stranger may have sent: whatever is not as it should be
is a TransferError that says so.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa

from fp8scope.cli.export import TransferError

FORMATS = (1, 2, 3)
# The first that has alerts.
JUDGED = 3
KEY = "fp8scope"
SAID = {"id", "run", "rows", "tensors", "catalogues", "writers"}
# Of one message: 8 MiB of float64.
MOST_CELLS = 1 << 20
BLOCK = 64 << 20
# Of a histogram; docs/wire.md.
BINS = 279
WHOLE = {"writer": pa.int32(), "seq": pa.int64(), "step": pa.int64()}
# What a row is that is no step of the run: the column that says so.
DOCUMENTS = ("evaluation", "report", "alert", "command")
HISTOGRAM = "histogram"
# What the server puts before a column's name, or a part of it, that a spreadsheet would take for a formula.
ADDED = re.compile(r"(?:^|(?<=[,;\t\r\n]))'(?='*[=+\-@\t\r])")

Kind = Literal["rows", "evaluation", "report", "alert", "command", "histogram"]


@dataclass(frozen=True)
class Part:
    """What becomes one message of the writer at this place in the description."""

    writer: int
    kind: Kind
    rows: pa.RecordBatch

    def document(self) -> dict[str, Any]:
        """The JSON of an evaluation, a report, an alert or a command."""
        try:
            found = json.loads(self.rows.column(self.kind)[0].as_py())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TransferError(f"the file is damaged: its {self.kind} is no JSON object")
        return found

    def step(self) -> int:
        """The step of its first row."""
        return int(self.rows.column("step")[0].as_py())

    def counts(self) -> "pa.Array[Any]":
        """The histograms, one after the other."""
        column = cast("pa.ListArray[Any]", self.rows.column(HISTOGRAM))
        kind = column.type
        if (
            not pa.types.is_list(kind)
            or kind.value_type != pa.float64()
            or (column.value_lengths().to_numpy(zero_copy_only=False) != BINS).any()
        ):
            raise TransferError(f"the file is damaged: a histogram is not of {BINS} numbers")
        return column.flatten()

    def tensors(self, places: Mapping[int, int]) -> Any:
        """int32: the place in the writer's catalogue of each histogram's tensor, by its place in the run."""
        found = self.rows.column("tensor").to_pylist()
        if unknown := [tensor for tensor in found if tensor not in places]:
            raise TransferError(
                f"the file is damaged: a histogram is of tensor {unknown[0]}, which its process did not watch"
            )
        return np.array([places[int(tensor)] for tensor in found if tensor is not None], np.int32)


class File:
    """An export, as Parquet or CSV. `description` is what it says of the run.

    Raises:
        TransferError: it is not an export of ours, or a newer one.
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
            raise TransferError(f"{path} is not a file that `fp8scope export` wrote") from None
        if version not in FORMATS:
            raise TransferError(
                f"{path} has format {version}, this fp8scope reads {FORMATS[-1]}: install a newer one"
            )
        if lacking := SAID - self.description.keys():
            raise TransferError(f"{path} is damaged: its description lacks {', '.join(sorted(lacking))}")

    @property
    def judged(self) -> bool:
        """Whether the run's alerts are in it, none if it had none."""
        return bool(self.description["format"] >= JUDGED)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(int(self.description.get(what, 0)) for what in ("rows", "documents", "histograms"))

    def parts(self, cells: int) -> Iterator[Part]:
        """The messages, one at a time; `cells` is how many values a row of the run has, at most."""
        for piece in self._pieces():
            self._check(piece)
            yield from _cut(piece, cells)

    def _first_line(self) -> bytes:
        with self.path.open("rb") as file:
            return file.readline().partition(b" ")[2]

    def _footer(self) -> bytes:
        from pyarrow import parquet

        try:
            return (parquet.read_schema(self.path).metadata or {}).get(KEY.encode(), b"")
        except pa.ArrowInvalid:
            return b""

    def _pieces(self) -> Iterator[pa.RecordBatch]:
        """The rows, some at a time. A statistic of a CSV file is a column for each tensor."""
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
        kinds: dict[str, pa.DataType] = {name: pa.float64() for name in header}
        kinds |= WHOLE | {name: pa.string() for name in DOCUMENTS}
        kinds["time"] = pa.timestamp("us", tz="UTC")
        convert = csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
        names = [ADDED.sub("", name) for name in header]
        with self.path.open("rb") as file:
            file.readline()
            for piece in csv.open_csv(file, csv.ReadOptions(block_size=BLOCK), convert_options=convert):
                yield piece.rename_columns(names)

    def _check(self, piece: pa.RecordBatch) -> None:
        for name, kind in WHOLE.items():
            if name not in piece.schema.names or piece.schema.field(name).type != kind:
                raise TransferError(f"{self.path} is damaged: it has no column {name} of {kind}")
            if piece.column(name).null_count:
                raise TransferError(f"{self.path} is damaged: a {name} is missing")
        if HISTOGRAM in piece.schema.names and "tensor" not in piece.schema.names:
            raise TransferError(
                f"{self.path} is damaged: it does not say of which tensors its histograms are"
            )
        writers = piece.column("writer").to_numpy()
        known = len(self.description["writers"])
        if len(writers) and not 0 <= writers.min() <= writers.max() < known:
            raise TransferError(f"{self.path} is damaged: it names a process that it does not describe")


def _cut(piece: pa.RecordBatch, cells: int) -> Iterator[Part]:
    """Rows of one writer whose steps do not decrease, cut as agents cut them; histograms as they came.

    A message with very many histograms becomes several: each tensor's is found all the same.
    """
    kinds: tuple[Kind, ...] = get_args(Kind)
    codes = _codes(piece, kinds)
    writers, seqs, steps = (piece.column(name).to_numpy() for name in ("writer", "seq", "step"))
    sampled = codes[1:] == kinds.index("histogram")
    ends = (np.diff(writers) != 0) | (np.diff(codes) != 0) | (np.diff(steps) < 0)
    ends |= sampled & ((np.diff(seqs) != 0) | (np.diff(steps) != 0))
    ends |= np.isin(codes[1:], [kinds.index(name) for name in DOCUMENTS])
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(steps)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        for at in range(begin, end, most := _rows_of_a_message(kinds[codes[begin]], cells)):
            yield Part(int(writers[at]), kinds[codes[at]], piece.slice(at, min(most, end - at)))


def _codes(piece: pa.RecordBatch, kinds: tuple[Kind, ...]) -> Any:
    """int8: what each row is, as a place in `kinds`."""
    codes = np.zeros(piece.num_rows, np.int8)
    for code, name in enumerate(kinds):
        if code and name in piece.schema.names:
            codes[piece.column(name).is_valid().to_numpy(zero_copy_only=False)] = code
    return codes


def _rows_of_a_message(kind: Kind, cells: int) -> int:
    return max(1, MOST_CELLS // (BINS if kind == HISTOGRAM else max(1, cells)))
