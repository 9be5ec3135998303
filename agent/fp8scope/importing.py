"""`fp8scope import`: bring an exported run to a server, through the same door as any run.

The rows are sent as an agent would send them, so a file may be imported again after an interruption: what has
arrived counts once. An imported run has an id of its own, computed from the one in the file.
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fp8scope.batcher import CONTENT_TYPE, PROTOCOL
from fp8scope.config import ConfigurationError, Settings
from fp8scope.exporting import TransferError, connected
from fp8scope.guard import configure_logging
from fp8scope.records import dump_json
from fp8scope.transport import Action, Backoff, Transport

FORMAT = 1
KEY = "fp8scope"
TENSORS_AT_ONCE = 2000
# Of one message: 8 MiB of float64.
MOST_CELLS = 1 << 20
BLOCK = 64 << 20
PATIENCE_SECONDS = 120.0


def import_(arguments: list[str]) -> int:
    """Upload a run that `fp8scope export` has written."""
    parser = argparse.ArgumentParser(prog="fp8scope import", description=import_.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--id", type=uuid.UUID, help="the new run's id; default: computed from the old one")
    parser.add_argument("--url", help="the server (else FP8SCOPE_URL, else `fp8scope login`)")
    parser.add_argument("--project", help="which login to use")
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        settings = connected(options.url, options.project)
        with Progress(
            TextColumn("rows"), BarColumn(), MofNCompleteColumn(), console=Console(stderr=True)
        ) as bar:
            upload = Upload(settings, File(options.file), options.id)
            task = bar.add_task("rows", total=upload.file.description["rows"])
            for rows in upload.send():
                bar.update(task, completed=rows)
    except (ConfigurationError, TransferError, OSError, pa.ArrowException) as error:
        print(f"fp8scope import: {error}", file=sys.stderr)
        return 1
    print(upload.page)
    return 0


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
        if version != FORMAT:
            raise TransferError(
                f"{path} has format {version}, this fp8scope reads {FORMAT}: install a newer one"
            )

    def _first_line(self) -> bytes:
        with self.path.open("rb") as file:
            return file.readline().partition(b" ")[2]

    def _footer(self) -> bytes:
        from pyarrow import parquet

        try:
            return (parquet.read_schema(self.path).metadata or {}).get(KEY.encode(), b"")
        except pa.ArrowInvalid:
            return b""

    def pieces(self) -> Iterator[pa.RecordBatch]:
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
        kinds |= {"writer": pa.int32(), "seq": pa.int64(), "step": pa.int64(), "evaluation": pa.string()}
        kinds["time"] = pa.timestamp("us", tz="UTC")
        convert = csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
        with self.path.open("rb") as file:
            file.readline()
            yield from csv.open_csv(file, csv.ReadOptions(block_size=BLOCK), convert_options=convert)


class Upload:
    """One file on its way to one server. `page` is the new run's address, once registered."""

    def __init__(self, settings: Settings, file: File, run: uuid.UUID | None = None) -> None:
        self.file = file
        self.run = str(run or uuid.uuid5(uuid.UUID(file.description["id"]), "imported"))
        self.page = ""
        self._transport = Transport(settings)
        self._writers = file.description["writers"]
        self._catalogues = [np.asarray(each, np.int64) for each in file.description["catalogues"]]
        self._tensors = {each["name"]: place for place, each in enumerate(file.description["tensors"])}
        self._seqs = [0] * len(self._writers)
        self._sent = [(0, 0)] * len(self._writers)

    def send(self) -> Iterator[int]:
        """Send everything; yields the number of rows sent so far.

        Raises:
            TransferError: the server refuses it, or does not answer for two minutes.
        """
        answer = self._post("PUT", "", dump_json(self.file.description["run"]))
        self.page = str(answer.get("url", ""))
        for writer in self._writers:
            self._send_catalogue(writer)
        rows = 0
        for writer, part in _messages(self.file.pieces(), self._cells()):
            if isinstance(part, str):
                self._send_scores(writer, json.loads(part))
            else:
                self._send_rows(writer, part)
                rows += part.num_rows
            yield rows
        for place, writer in enumerate(self._writers):
            if writer["finished"]:
                self._finish(place, writer)

    def _cells(self) -> int:
        return max(1, len(self._tensors) * 8)

    def _send_catalogue(self, writer: Mapping[str, Any]) -> None:
        tensors = [self.file.description["tensors"][index] for index in self._catalogues[writer["catalogue"]]]
        place = {name: writer[name] for name in ("rank", "hostname", "attempt")}
        for offset in range(0, max(1, len(tensors)), TENSORS_AT_ONCE):
            chunk = tensors[offset : offset + TENSORS_AT_ONCE]
            document = {**place, "offset": offset, "tensors": chunk}
            self._post("POST", f"/writers/{writer['uuid']}/tensors", dump_json(document))

    def _send_rows(self, writer: int, part: pa.RecordBatch) -> None:
        described = self._writers[writer]
        catalogue = self._catalogues[described["catalogue"]]
        metadata = {
            "protocol": PROTOCOL,
            "run": self.run,
            "writer": described["uuid"],
            "seq": self._seqs[writer],
            "dropped": described["dropped"],
        }
        body = encode(part, self._tensors, catalogue, metadata)
        answer = self._post("POST", "/batches", body, CONTENT_TYPE)
        sent, points = self._sent[writer]
        self._sent[writer] = (sent + part.num_rows, points + int(answer["points"]))
        self._seqs[writer] += 1

    def _send_scores(self, writer: int, scores: Mapping[str, Any]) -> None:
        document = {**scores, "writer": self._writers[writer]["uuid"], "seq": self._seqs[writer]}
        self._post("POST", "/evaluations", dump_json(document))
        self._seqs[writer] += 1

    def _finish(self, place: int, writer: Mapping[str, Any]) -> None:
        rows, points = self._sent[place]
        document = {
            "writer": writer["uuid"],
            "seq": self._seqs[place],
            "state": "failed" if writer["failed"] else "finished",
            "error": writer["error"],
            "rows_sent": rows,
            "points_sent": points,
            "dropped": writer["dropped"],
            "errors": writer["errors"],
        }
        self._post("POST", "/finish", dump_json(document))

    def _post(self, method: str, path: str, body: bytes, kind: str = "application/json") -> Mapping[str, Any]:
        backoff, deadline = Backoff(0.5, 10.0), time.monotonic() + PATIENCE_SECONDS
        while True:
            outcome = self._transport.send(method, f"/runs/{self.run}{path}", body, kind)
            if outcome.action is Action.DONE:
                return outcome.answer
            if outcome.action not in (Action.WAIT, Action.RETRY) or time.monotonic() > deadline:
                raise TransferError(outcome.message or outcome.code or f"HTTP {outcome.status}")
            time.sleep(max(outcome.wait or 0.0, backoff.next(), 0.01))


def _messages(pieces: Iterator[pa.RecordBatch], cells: int) -> Iterator[tuple[int, Any]]:
    """Rows of one writer whose steps do not decrease, cut as agents cut them; or an evaluation's JSON."""
    most = max(1, MOST_CELLS // cells)
    for piece in pieces:
        writers = piece.column("writer").to_numpy()
        steps = piece.column("step").to_numpy()
        scores = piece.column("evaluation").is_valid().to_numpy(zero_copy_only=False)
        ends = (np.diff(writers) != 0) | (np.diff(steps) < 0) | (np.diff(scores.astype(np.int8)) != 0)
        ends |= scores[1:]
        bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(steps)]
        for begin, end in zip(bounds, bounds[1:], strict=False):
            if begin < end and scores[begin]:
                yield int(writers[begin]), piece.column("evaluation")[begin].as_py()
                continue
            for at in range(begin, end, most):
                yield int(writers[at]), piece.slice(at, min(most, end - at))


def encode(
    part: pa.RecordBatch, tensors: Mapping[str, int], catalogue: Any, metadata: Mapping[str, object]
) -> bytes:
    """Rows of an export as docs/wire.md has them: lists over the writer's catalogue, no empty columns."""
    fields: list[pa.Field[Any]] = []
    columns: list[pa.Array[Any]] = []

    def add(name: str, column: "pa.Array[Any]", nullable: bool = True) -> None:
        fields.append(pa.field(name, column.type, nullable=nullable))
        columns.append(column)

    statistics: dict[str, Any] = {}
    for name, column in zip(part.schema.names, part.columns, strict=True):
        if name in ("step", "time"):
            add(name, column, nullable=False)
        elif name.startswith("scalar:") and column.null_count < len(column):
            add(name, column)
        elif name.startswith("tensor:") and column.null_count < len(column) and len(catalogue):
            _collect(statistics, name, column, tensors)
    for name, matrix in statistics.items():
        flat = matrix[:, catalogue].reshape(-1)
        values = pa.array(flat, pa.float64(), mask=np.isnan(flat))
        add(name, pa.FixedSizeListArray.from_arrays(values, len(catalogue)))
    schema = pa.schema(fields, metadata={f"fp8scope.{key}": str(value) for key, value in metadata.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue().to_pybytes()


def _collect(
    statistics: dict[str, Any], name: str, column: "pa.Array[Any]", tensors: Mapping[str, int]
) -> None:
    """Put a column into its statistic's float64[rows, tensors]; NaN is: not observed."""
    key, _, tensor = name.removeprefix("tensor:").partition(":")
    matrix = statistics.setdefault(f"tensor:{key}", np.full((len(column), len(tensors)), np.nan))
    if tensor:
        matrix[:, tensors[tensor]] = column.to_numpy(zero_copy_only=False)
        return
    present = column.is_valid().to_numpy(zero_copy_only=False)
    flat = cast("pa.ListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
    matrix[present] = flat.reshape(-1, len(tensors))
