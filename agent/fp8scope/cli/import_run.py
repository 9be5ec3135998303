"""Uploads a run from a file that `fp8scope export` wrote.

The rows are sent in the agent's protocol, so an interrupted import can be repeated: no row is
stored twice. The imported run gets a new id, which is computed from the id in the file.
"""

import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from fp8scope.cli.archive import BINS, Archive, MessageRows
from fp8scope.cli.progress import ProgressLine
from fp8scope.client.plain_text import printable
from fp8scope.config import Settings
from fp8scope.delivery.arrow_encoding import CONTENT_TYPE, PROTOCOL
from fp8scope.delivery.messages import MEDIA_TYPE
from fp8scope.delivery.sender import MATRIX
from fp8scope.importing.posting import CONTENT_NEEDED, REFUSALS, Poster, TransferError
from fp8scope.recording.media import joined
from fp8scope.recording.records import dump_json

TENSORS_PER_MESSAGE = 2000
# What older servers do not know; it is left out for them.
OPTIONAL = ("note", "artefact")
MEDIA = ("name", "kind", "step", "caption", "file_name", "sha256", "size")


def import_archive(settings: Settings, path: Path, run: uuid.UUID | None) -> int:
    """Upload the run of an archive, and print its address. Returns the exit status."""
    upload = Upload(settings, Archive(path), run)
    line = ProgressLine("importing", unit="rows")
    try:
        for rows in upload.send():
            line.update(rows, upload.archive.rows)
    except pa.ArrowException as error:
        raise TransferError(f"{path} is damaged: {error}") from error
    finally:
        line.end()
    print(upload.page)
    for reason, count in upload.left_out.items():
        print(f"  {count:,} media refused: {printable(reason)}", file=sys.stderr)
    return 0


class Upload:
    """Sends one archive to a server. `page` is the address of the new run, once it is registered."""

    def __init__(self, settings: Settings, archive: Archive, run: uuid.UUID | None = None) -> None:
        self.archive = archive
        self.run = str(run or uuid.uuid5(uuid.UUID(archive.description["id"]), "imported"))
        self.page = ""
        self.left_out: Counter[str] = Counter()
        """Media that the server did not take, by its reason."""
        self._accepts: set[str] = set()
        self._poster = Poster(settings)
        self._writers = archive.description["writers"]
        self._catalogues = [
            np.asarray(catalogue, np.int64) for catalogue in archive.description["catalogues"]
        ]
        self._catalogue_indexes = [
            {int(tensor): index for index, tensor in enumerate(catalogue)} for catalogue in self._catalogues
        ]
        self._tensors = {tensor["name"]: index for index, tensor in enumerate(archive.description["tensors"])}
        self._seqs = [0] * len(self._writers)
        self._sent = [(0, 0)] * len(self._writers)

    def send(self) -> Iterator[int]:
        """Send everything; yields the number of rows sent so far.

        Raises:
            TransferError: the server refuses the run, or does not answer for two minutes.
        """
        answer = self._post("PUT", "", dump_json(self.archive.description["run"]))
        self.page = str(answer.get("url", ""))
        self._accepts = set(answer.get("accepts") or ())
        for writer in self._writers:
            self._send_catalogue(writer)
        rows = 0
        for part in self.archive.parts(self._cells()):
            if part.kind == "rows":
                self._send_rows(part.writer, part.rows)
            elif part.kind == "histogram":
                self._send_histograms(part)
            else:
                self._send_document(part)
            rows += part.rows.num_rows
            yield rows
        for index, writer in enumerate(self._writers):
            if writer["finished"]:
                self._finish(index, writer)

    def _cells(self) -> int:
        return max(1, len(self._tensors) * 8)

    def _send_catalogue(self, writer: Mapping[str, Any]) -> None:
        tensors = [
            self.archive.description["tensors"][index] for index in self._catalogues[writer["catalogue"]]
        ]
        process = {name: writer[name] for name in ("rank", "hostname", "attempt")}
        process["imported"] = self.archive.has_alerts
        for offset in range(0, max(1, len(tensors)), TENSORS_PER_MESSAGE):
            chunk = tensors[offset : offset + TENSORS_PER_MESSAGE]
            document = {**process, "offset": offset, "tensors": chunk}
            self._post("POST", f"/writers/{writer['uuid']}/tensors", dump_json(document))

    def _send_rows(self, writer: int, part: pa.RecordBatch) -> None:
        description = self._writers[writer]
        catalogue = self._catalogues[description["catalogue"]]
        metadata = {**self._metadata(writer), "dropped": description["dropped"]}
        body = encode(part, self._tensors, catalogue, metadata)
        answer = self._post("POST", "/batches", body, CONTENT_TYPE)
        sent, points = self._sent[writer]
        self._sent[writer] = (sent + part.num_rows, points + int(answer["points"]))
        self._seqs[writer] += 1

    def _send_histograms(self, part: MessageRows) -> None:
        indexes = self._catalogue_indexes[self._writers[part.writer]["catalogue"]]
        body = encode_histograms(part, indexes, self._metadata(part.writer))
        self._post("POST", "/histograms", body, CONTENT_TYPE)
        self._seqs[part.writer] += 1

    def _send_document(self, part: MessageRows) -> None:
        document, path = part.document(), "/reports"
        if part.kind == "media":
            self._send_media(part, document)
            return
        if part.kind == "report":
            document = {**dict(document.pop("document", {})), **document}
        elif part.kind == "evaluation":
            if document.get("matrix") is not None and MATRIX not in self._accepts:
                return
            path = "/evaluations"
        elif part.kind == "console":
            if "console" not in self._accepts:
                return
            document = {"kind": "console", "step": part.step(), **document}
        else:
            # Imported alerts notify nobody, and imported commands are given to no process.
            if part.kind in OPTIONAL and f"past_{part.kind}" not in self._accepts:
                return
            document = {"kind": f"past_{part.kind}", "step": part.step(), part.kind: document}
        origin = {"writer": self._writers[part.writer]["uuid"], "seq": self._seqs[part.writer]}
        self._post("POST", path, dump_json({**document, **origin}))
        self._seqs[part.writer] += 1

    def _send_media(self, part: MessageRows, document: dict[str, Any]) -> None:
        """Send a media; one that the server does not take is left out, and counted."""
        if "media" not in self._accepts:
            self.left_out["the server is too old for them: update it."] += 1
            return
        fields = {name: document.get(name) for name in MEDIA}
        head = {**fields, "writer": self._writers[part.writer]["uuid"], "seq": self._seqs[part.writer]}
        try:
            self._post("POST", "/media", joined(head, part.content()), MEDIA_TYPE)
        except TransferError as error:
            if error.code not in (*REFUSALS, CONTENT_NEEDED):
                raise
            self.left_out[str(error)] += 1
        else:
            self._seqs[part.writer] += 1

    def _metadata(self, writer: int) -> dict[str, object]:
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "writer": self._writers[writer]["uuid"],
            "seq": self._seqs[writer],
        }

    def _finish(self, index: int, writer: Mapping[str, Any]) -> None:
        rows, points = self._sent[index]
        document = {
            "writer": writer["uuid"],
            "seq": self._seqs[index],
            "state": "failed" if writer["failed"] else "finished",
            "error": writer["error"],
            "rows_sent": rows,
            "points_sent": points,
            "dropped": writer["dropped"],
            "errors": writer["errors"],
        }
        self._post("POST", "/finish", dump_json(document))

    def _post(self, method: str, path: str, body: bytes, kind: str = "application/json") -> Mapping[str, Any]:
        return self._poster.post(method, f"{self.run}{path}", body, kind)


def encode(
    part: pa.RecordBatch, tensors: Mapping[str, int], catalogue: Any, metadata: Mapping[str, object]
) -> bytes:
    """Encode rows as a batch of docs/wire.md: lists over the writer's catalogue, without empty columns."""
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


def encode_histograms(part: MessageRows, indexes: Mapping[int, int], metadata: Mapping[str, object]) -> bytes:
    """Encode histograms as in docs/wire.md; `indexes` maps the run's tensors to the writer's catalogue.

    Raises:
        TransferError: the histograms are malformed.
    """
    columns = {
        "step": part.rows.column("step"),
        "time": part.rows.column("time"),
        "tensor": pa.array(part.tensors(indexes)),
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
    """Copy a column into the float64[rows, tensors] of its statistic; NaN means not observed."""
    key, _, tensor = name.removeprefix("tensor:").partition(":")
    matrix = statistics.setdefault(f"tensor:{key}", np.full((len(column), len(tensors)), np.nan))
    if tensor:
        matrix[:, tensors[tensor]] = column.to_numpy(zero_copy_only=False)
        return
    present = column.is_valid().to_numpy(zero_copy_only=False)
    flat = cast("pa.ListArray[Any]", column).flatten().to_numpy(zero_copy_only=False)
    matrix[present] = flat.reshape(-1, len(tensors))
