"""Builds messages for the server from the records in the spool."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8scope.config import Settings
from fp8scope.delivery.arrow_encoding import CONTENT_TYPE, encode_batch, encode_histograms
from fp8scope.delivery.cursor import SendProgress
from fp8scope.delivery.transport import SendOutcome
from fp8scope.recording.media import joined
from fp8scope.recording.records import ExponentHistograms, Record, RecordKind, Row, dump_json, load_json
from fp8scope.recording.spool import Spool

JSON_TYPE = "application/json"
MEDIA_TYPE = "application/vnd.fp8scope.media"
ENDINGS = {CONTENT_TYPE: "arrow", MEDIA_TYPE: "media"}
ASK_FIRST = 64 << 10
"""Larger contents are sent only if the server does not have them."""
JSON_PATHS = {RecordKind.EVALUATION: "evaluations", RecordKind.REPORT: "reports", RecordKind.FINISH: "finish"}


@dataclass(frozen=True, kw_only=True)
class Message:
    """The body of one POST, with one seq: the records from the cursor's position to `end`."""

    kind: RecordKind
    path: str
    body: bytes
    content_type: str
    end: int
    records: int
    rows: int
    points: int
    shorter: bytes = b""
    """A body that says the same to a server that has the content; empty if there is none."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


class Reader:
    """Builds messages from the spool. Holds the registration and the catalogue that it has read so far."""

    def __init__(self, run: str, spool: Spool, settings: Settings) -> None:
        self.registration = b""
        self.catalogue: list[dict[str, Any]] = []
        self.origin: dict[str, Any] = {}
        """The writer's rank, host and attempt; see `Origin`."""
        self.row_limit = settings.batch_rows
        self._run = run
        self._spool = spool
        self._settings = settings
        self._statistics: list[str] = []

    def learn(self, record: Record) -> None:
        """Store a registration, or an extension of the catalogue."""
        if record.kind is RecordKind.REGISTRATION:
            self.registration = record.payload
            return
        document = load_json(record.payload)
        tensor_count = len(self.catalogue)
        offset = int(document["offset"])
        if offset <= tensor_count:
            self.catalogue += document["tensors"][tensor_count - offset :]
        self._statistics = list(document["statistics"])
        self.origin = {name: document[name] for name in ("rank", "hostname", "attempt")}

    def build(self, first: Record, progress: SendProgress) -> Message:
        """Return the message that begins with the record `first`."""
        if first.kind is RecordKind.ROW:
            rows, end = self._gather(first, progress.sealed_end)
            batch = encode_batch(
                rows, self._statistics, run=self._run, writer=progress.writer, seq=progress.seq
            )
            path = "batches"
            return Message(
                kind=first.kind,
                path=path,
                body=batch.body,
                content_type=CONTENT_TYPE,
                end=end,
                records=len(rows),
                rows=batch.rows,
                points=batch.points,
            )
        if first.kind is RecordKind.HISTOGRAM:
            histograms = ExponentHistograms.decode(first.payload)
            body = encode_histograms(histograms, run=self._run, writer=progress.writer, seq=progress.seq)
            return Message(
                kind=first.kind,
                path="histograms",
                body=body,
                content_type=CONTENT_TYPE,
                end=first.end,
                records=1,
                rows=0,
                points=0,
            )
        if first.kind is RecordKind.MEDIA:
            return self._media(first, progress)
        document = {**load_json(first.payload), "writer": progress.writer, "seq": progress.seq}
        if first.kind is RecordKind.FINISH:
            document |= {"rows_sent": progress.rows_sent, "points_sent": progress.points_sent}
        path = JSON_PATHS[first.kind]
        return Message(
            kind=first.kind,
            path=path,
            body=dump_json(document),
            content_type=JSON_TYPE,
            end=first.end,
            records=1,
            rows=0,
            points=0,
        )

    @staticmethod
    def _media(first: Record, progress: SendProgress) -> Message:
        line, _, content = first.payload.partition(b"\n")
        head = {**load_json(line), "writer": progress.writer, "seq": progress.seq}
        return Message(
            kind=first.kind,
            path="media",
            body=joined(head, content),
            content_type=MEDIA_TYPE,
            end=first.end,
            records=1,
            rows=0,
            points=0,
            shorter=joined(head, b"") if len(content) > ASK_FIRST else b"",
        )

    def _gather(self, first: Record, sealed_end: int) -> tuple[list[Row], int]:
        """Return the rows of the sealed message, or as many as fit into a new one, and their end."""
        rows, end, size = [Row.decode(first.payload)], first.end, len(first.payload)
        while sealed_end == 0 or end < sealed_end:
            record = self._spool.read(end)
            if record is None or record.kind is not RecordKind.ROW:
                break
            row = Row.decode(record.payload)
            size += len(record.payload)
            fits = (
                len(rows) < self.row_limit
                and size <= self._settings.batch_bytes
                and row.step >= rows[-1].step
            )
            if sealed_end == 0 and not fits:
                break
            rows.append(row)
            end = record.end
        return rows, end


def write_refused(directory: Path, message: Message, outcome: SendOutcome) -> None:
    """Write a refused message and the reason for the refusal to two files."""
    folder = directory / "refused"
    folder.mkdir(exist_ok=True)
    name = f"{message.end:020d}"
    ending = ENDINGS.get(message.content_type, "json")
    (folder / f"{name}.{ending}").write_bytes(message.body)
    why = {
        "status": outcome.status,
        "code": outcome.code,
        "message": outcome.message,
        "path": message.path,
    }
    (folder / f"{name}.why.json").write_bytes(dump_json(why))
