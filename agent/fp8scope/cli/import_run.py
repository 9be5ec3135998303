"""`fp8scope import`: bring an exported run to a server, through the same door as any run.

The rows are sent as an agent would send them, so a file may be imported again after an interruption: what has
arrived counts once. An imported run has an id of its own, computed from the one in the file.
"""

import argparse
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fp8scope.cli.archive import BINS, File, Part
from fp8scope.cli.export import TransferError, connected
from fp8scope.config import ConfigurationError, Settings
from fp8scope.delivery.arrow_encoding import CONTENT_TYPE, PROTOCOL
from fp8scope.delivery.transport import Action, Backoff, Transport
from fp8scope.guard import configure_logging
from fp8scope.recording.records import dump_json

TENSORS_AT_ONCE = 2000
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
            task = bar.add_task("rows", total=upload.file.rows)
            for rows in upload.send():
                bar.update(task, completed=rows)
    except (ConfigurationError, TransferError, OSError, pa.ArrowException) as error:
        print(f"fp8scope import: {error}", file=sys.stderr)
        return 1
    print(upload.page)
    return 0


class Upload:
    """One file on its way to one server. `page` is the new run's address, once registered."""

    def __init__(self, settings: Settings, file: File, run: uuid.UUID | None = None) -> None:
        self.file = file
        self.run = str(run or uuid.uuid5(uuid.UUID(file.description["id"]), "imported"))
        self.page = ""
        self._transport = Transport(settings)
        self._writers = file.description["writers"]
        self._catalogues = [np.asarray(each, np.int64) for each in file.description["catalogues"]]
        self._places = [{int(tensor): at for at, tensor in enumerate(each)} for each in self._catalogues]
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
        for part in self.file.parts(self._cells()):
            if part.kind == "rows":
                self._send_rows(part.writer, part.rows)
            elif part.kind == "histogram":
                self._send_histograms(part)
            else:
                self._send_document(part)
            rows += part.rows.num_rows
            yield rows
        for place, writer in enumerate(self._writers):
            if writer["finished"]:
                self._finish(place, writer)

    def _cells(self) -> int:
        return max(1, len(self._tensors) * 8)

    def _send_catalogue(self, writer: Mapping[str, Any]) -> None:
        tensors = [self.file.description["tensors"][index] for index in self._catalogues[writer["catalogue"]]]
        place = {name: writer[name] for name in ("rank", "hostname", "attempt")}
        place["imported"] = self.file.judged
        for offset in range(0, max(1, len(tensors)), TENSORS_AT_ONCE):
            chunk = tensors[offset : offset + TENSORS_AT_ONCE]
            document = {**place, "offset": offset, "tensors": chunk}
            self._post("POST", f"/writers/{writer['uuid']}/tensors", dump_json(document))

    def _send_rows(self, writer: int, part: pa.RecordBatch) -> None:
        described = self._writers[writer]
        catalogue = self._catalogues[described["catalogue"]]
        metadata = {**self._metadata(writer), "dropped": described["dropped"]}
        body = encode(part, self._tensors, catalogue, metadata)
        answer = self._post("POST", "/batches", body, CONTENT_TYPE)
        sent, points = self._sent[writer]
        self._sent[writer] = (sent + part.num_rows, points + int(answer["points"]))
        self._seqs[writer] += 1

    def _send_histograms(self, part: Part) -> None:
        places = self._places[self._writers[part.writer]["catalogue"]]
        body = encode_histograms(part, places, self._metadata(part.writer))
        self._post("POST", "/histograms", body, CONTENT_TYPE)
        self._seqs[part.writer] += 1

    def _send_document(self, part: Part) -> None:
        document, path = part.document(), "/reports"
        if part.kind == "report":
            document = {**dict(document.pop("document", {})), **document}
        elif part.kind == "evaluation":
            path = "/evaluations"
        else:
            # A record of what was, which nobody is told of and no process is given.
            document = {"kind": f"past_{part.kind}", "step": part.step(), part.kind: document}
        place = {"writer": self._writers[part.writer]["uuid"], "seq": self._seqs[part.writer]}
        self._post("POST", path, dump_json({**document, **place}))
        self._seqs[part.writer] += 1

    def _metadata(self, writer: int) -> dict[str, object]:
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "writer": self._writers[writer]["uuid"],
            "seq": self._seqs[writer],
        }

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
    return _serialise(fields, columns, metadata)


def encode_histograms(part: Part, places: Mapping[int, int], metadata: Mapping[str, object]) -> bytes:
    """Histograms of an export as docs/wire.md has them; `places`: of the run's tensors in the catalogue.

    Raises:
        TransferError: they are none.
    """
    columns = {
        "step": part.rows.column("step"),
        "time": part.rows.column("time"),
        "tensor": pa.array(part.tensors(places)),
        "counts": pa.FixedSizeListArray.from_arrays(part.counts(), BINS),
    }
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    return _serialise(fields, list(columns.values()), metadata)


def _serialise(
    fields: "Sequence[pa.Field[Any]]", columns: "Sequence[pa.Array[Any]]", metadata: Mapping[str, object]
) -> bytes:
    schema = pa.schema(fields, metadata={f"fp8scope.{key}": str(value) for key, value in metadata.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(list(columns), schema=schema))
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
