"""Sends a run that was read from a file, so that sending it again changes nothing.

The id of the run, its writers and the numbers of its messages follow from the file, so that the server
recognises a message that is stored. Where another one is stored under its number, the file has grown since:
then the server is asked what it has, and only the rest is sent.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fp8scope.client.connection import ClientError, Connection
from fp8scope.config import Settings
from fp8scope.delivery.arrow_encoding import CONTENT_TYPE
from fp8scope.delivery.messages import ASK_FIRST, MEDIA_TYPE
from fp8scope.importing.encoding import encode, in_parts
from fp8scope.importing.model import SourceEvaluation, SourceMedia, SourceRun, ValueTable
from fp8scope.importing.posting import CONTENT_NEEDED, REFUSALS, Poster, TransferError
from fp8scope.importing.stored import StoredValues, read_stored
from fp8scope.importing.values import iso_of, seconds_of, storable
from fp8scope.recording.evaluation import evaluation_document
from fp8scope.recording.media import joined, logged
from fp8scope.recording.records import dump_json

_NO_STEPS: Final = np.zeros(0, np.int64)
NAMESPACE: Final = uuid.UUID("6b1c4f0e-2a5d-4c2f-9b8e-0d3f7a91c5e4")
TENSORS_PER_MESSAGE: Final = 2_000
CONFLICT: Final = "writer_conflict"
MAX_REASONS: Final = 20
MAX_TRIES: Final = 100_000
"""Numbers of messages that are tried, where the file has grown."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Wishes of the person who imports; empty fields leave what the file says.

    Attributes:
        run: the id of an existing run that takes the values; None for a run of its own.
        copy: makes other runs of the same file.
    """

    name: str = ""
    group: str = ""
    baseline: str = ""
    precision: str = ""
    seed: int | None = None
    tags: tuple[str, ...] = ()
    run: uuid.UUID | None = None
    id: uuid.UUID | None = None
    copy: str = ""


@dataclass
class SentCounts:
    """Rows, points, evaluations and media that one import has sent, without those that were stored before."""

    rows: int = 0
    points: int = 0
    evaluations: int = 0
    media: int = 0

    @property
    def is_nothing(self) -> bool:
        return not (self.rows or self.points or self.evaluations or self.media)


@dataclass
class _Writer:
    id: str
    seq: int = 0
    tensors: int = -1
    rows: int = 0
    points: int = 0
    """Rows and points of all messages, whether stored now or before."""


def run_id_of(format_name: str, key: str, wishes: Wishes) -> uuid.UUID:
    """Return the id of a run: always the same for the same run of the same source."""
    if wishes.run or wishes.id:
        return wishes.run or wishes.id or uuid.UUID(int=0)
    return uuid.uuid5(NAMESPACE, json.dumps([format_name, key, wishes.copy]))


class ImportUpload:
    """Sends one run. `page` is the address of the run, once it is registered."""

    def __init__(
        self, settings: Settings, run: SourceRun, run_id: uuid.UUID, wishes: Wishes, *, format_name: str = ""
    ) -> None:
        self.run = run
        self.run_id = str(run_id)
        self.page = ""
        self.sent = SentCounts()
        self._wishes = wishes
        self._format = format_name
        self._poster = Poster(settings)
        self._connection = Connection(settings)
        self._writers: dict[tuple[int, int], _Writer] = {}
        self._stored: StoredValues | None = None
        self._base_time_us = 0
        self._latest_attempt = 0
        self._created_at = 0.0
        self._described = b""
        self._accepts: set[str] | None = None
        """Names of what the server takes; None in a run that is there already, whose server does not say."""
        self._refused: dict[str, int] = {}
        """Media that the server has refused, by its reason."""

    def send(self) -> Iterator[SentCounts]:
        """Send everything; yields what was sent so far.

        Raises:
            TransferError: the server refuses the run, or does not answer for two minutes.
            UnreadableError: the file is malformed; what was read before is stored.
        """
        try:
            self._register()
            for part in self.run.parts:
                if isinstance(part, SourceEvaluation):
                    self._send_evaluation(part)
                elif isinstance(part, SourceMedia):
                    self._send_media(part)
                else:
                    for table in in_parts(part):
                        self._send_table(table)
                yield self.sent
            if not self._writers:
                self._writer(ValueTable(steps=_NO_STEPS, times=None, scalars={}))
            self._describe_again()
            self._finish()
            self.run.notes += [f"{count:,} media refused: {why}" for why, count in self._refused.items()]
            yield self.sent
        finally:
            self._poster.close()
            self._connection.close()

    def _register(self) -> None:
        before = self._description()
        if self._wishes.run is not None:
            if not before:
                raise TransferError(f"the project has no run {self._wishes.run} that this token may read")
            self.page = str(before.get("url", ""))
            self._latest_attempt = int(before.get("last_attempt") or 0)
        created_at = self.run.created_at or seconds_of(str(before.get("created_at", ""))) or time.time()
        self._base_time_us = round(created_at * 1e6)
        if self._wishes.run is None:
            self._created_at = created_at
            self._described = dump_json(self._document())
            answer = self._post("PUT", "", self._described)
            self.page = str(answer.get("url", ""))
            self._accepts = set(answer.get("accepts") or ())

    def _description(self) -> dict[str, Any]:
        """The run as it is stored; empty if it is not, or the token may not read it."""
        try:
            return self._connection.json(f"/runs/{self.run_id}")
        except ClientError as error:
            if error.status in (403, 404, 409, 410):
                return {}
            raise TransferError(str(error), error.code) from error

    def _describe_again(self) -> None:
        """Send what the reader has learnt on its way, such as the summary at the end of the file."""
        if self._wishes.run is None and (document := dump_json(self._document())) != self._described:
            self._post("PUT", "", document)

    def _document(self) -> dict[str, Any]:
        run, wishes = self.run, self._wishes
        document = {
            "name": (wishes.name or run.name)[:200] or "imported",
            "precision": (wishes.precision or run.precision)[:32],
            "config": run.config,
            "summary": run.summary,
            "environment": {"imported_from": self._format, **run.environment},
            "tags": [tag[:64] for tag in dict.fromkeys((*run.tags, *wishes.tags)) if tag][:100],
            "group": (wishes.group or run.group)[:128],
            "baseline": wishes.baseline[:128],
            "seed": run.seed if wishes.seed is None else wishes.seed,
            "total_steps": run.total_steps,
            "created_at": iso_of(self._created_at),
        }
        return dict(storable(document))

    def _writer(self, table: ValueTable) -> _Writer:
        """The writer of a table, registered with the table's tensors."""
        writer = self._writers.get((table.rank, table.attempt))
        if writer is None:
            name = f"{table.rank}/{table.attempt}"
            if self._wishes.run is not None:
                # Values that are added to a run of somebody else come from a process of their own.
                name = f"{self._format} {self.run.key} {self._wishes.copy} {name}"
            writer = _Writer(str(uuid.uuid5(uuid.UUID(self.run_id), name)))
            self._writers[table.rank, table.attempt] = writer
        if len(table.tensors) > writer.tensors:
            self._send_catalogue(writer, table)
        return writer

    def _send_catalogue(self, writer: _Writer, table: ValueTable) -> None:
        first = max(0, writer.tensors)
        for offset in range(first, max(first + 1, len(table.tensors)), TENSORS_PER_MESSAGE):
            chunk = table.tensors[offset : offset + TENSORS_PER_MESSAGE]
            tensors = [
                {"name": t.name[:512], "module": t.module[:512], "role": t.role[:32], "format": t.format[:16]}
                for t in chunk
            ]
            document = {"offset": offset, "tensors": tensors, "rank": table.rank, "imported": True}
            document["attempt"] = self._attempt_of(table)
            self._post("POST", f"/writers/{writer.id}/tensors", dump_json(storable(document)))
        writer.tensors = len(table.tensors)

    def _attempt_of(self, table: ValueTable) -> int:
        """The attempt of a table's process: in a run that takes the values, its latest."""
        return table.attempt if self._wishes.run is None else self._latest_attempt

    def _send_table(self, table: ValueTable) -> None:
        if self._stored is None:
            if self._try_table(table):
                return
            # Another message is stored under this number: the file has grown since.
            self._stored = read_stored(self._connection, self.run_id)
        rest = self._stored.rest_of(table, self._attempt_of(table))
        if rest is not None:
            self._until_free(self._writer(table), lambda: self._try_table(rest))

    def _try_table(self, table: ValueTable) -> bool:
        """Send a table; returns False if another message is stored under its number."""
        writer = self._writer(table)
        batch = encode(table, self._base_time_us)
        try:
            answer = self._post(
                "POST", "/batches", batch.body(self.run_id, writer.id, writer.seq), CONTENT_TYPE
            )
        except TransferError as error:
            if error.code == CONFLICT:
                return False
            raise
        writer.seq += 1
        writer.rows += batch.rows
        writer.points += batch.points
        if answer.get("status") != "duplicate":
            self.sent.rows += batch.rows
            self.sent.points += batch.points
        return True

    def _send_evaluation(self, evaluation: SourceEvaluation) -> None:
        document = evaluation_document(
            evaluation.name,
            evaluation.metric,
            evaluation.items,
            kind=evaluation.kind,
            step=evaluation.step,
            higher_is_better=evaluation.higher_is_better,
            item_ids=evaluation.item_ids,
            clusters=None,
            precision=evaluation.precision,
        )
        writer = self._writer(ValueTable(steps=_NO_STEPS, times=None, scalars={}))
        if self._stored is None:
            if self._try_document(writer, "/evaluations", document):
                return
            self._stored = read_stored(self._connection, self.run_id)
        if (evaluation.name, evaluation.metric, evaluation.step) not in self._stored.evaluations:
            self._until_free(writer, lambda: self._try_document(writer, "/evaluations", document))

    def _try_document(self, writer: _Writer, path: str, document: dict[str, Any]) -> bool:
        numbered = {**document, "writer": writer.id, "seq": writer.seq}
        try:
            answer = self._post("POST", path, dump_json(numbered))
        except TransferError as error:
            if error.code == CONFLICT:
                return False
            raise
        writer.seq += 1
        if path == "/evaluations" and answer.get("status") != "duplicate":
            self.sent.evaluations += 1
        return True

    def _send_media(self, media: SourceMedia) -> None:
        if self._accepts is not None and "media" not in self._accepts:
            self._refuse("the server is too old for them: update it.")
            return
        writer = self._writer(ValueTable(steps=_NO_STEPS, times=None, scalars={}))
        if self._stored is None:
            if self._try_media(writer, media):
                return
            self._stored = read_stored(self._connection, self.run_id)
        if (media.name, media.step, hashlib.sha256(media.content).hexdigest()) not in self._stored.media:
            self._until_free(writer, lambda: self._try_media(writer, media))

    def _try_media(self, writer: _Writer, media: SourceMedia) -> bool:
        """Send a media; one that the server refuses is left out. Returns False if its number is taken."""
        prepared = logged(
            media.kind,
            media.name,
            media.content,
            step=media.step,
            caption=media.caption,
            file_name=media.file_name,
        )
        head = {**prepared.head(media.content), "writer": writer.id, "seq": writer.seq}
        try:
            answer = self._post_media(head, media.content)
        except TransferError as error:
            if error.code == CONFLICT:
                return False
            if error.code not in REFUSALS:
                raise
            self._refuse(str(error))
            return True
        writer.seq += 1
        self.sent.media += answer.get("status") != "duplicate"
        return True

    def _post_media(self, head: dict[str, Any], content: bytes) -> Mapping[str, Any]:
        """Send a message with media; a large content only if the project does not have it."""
        if len(content) > ASK_FIRST:
            try:
                return dict(self._post("POST", "/media", joined(head, b""), MEDIA_TYPE))
            except TransferError as error:
                if error.code != CONTENT_NEEDED:
                    raise
        return dict(self._post("POST", "/media", joined(head, content), MEDIA_TYPE))

    def _refuse(self, reason: str) -> None:
        if reason in self._refused or len(self._refused) < MAX_REASONS:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def _until_free(self, writer: _Writer, send: Any) -> None:
        for _ in range(MAX_TRIES):
            if send():
                return
            writer.seq += 1
        raise TransferError("the run has too many messages to be continued: import it as a copy, with --copy")

    def _finish(self) -> None:
        """Report the end of the run, and what was sent; of a run that has not ended, nothing."""
        if self.run.state == "running" and self._wishes.run is None:
            return
        stored = self._stored
        if stored is not None and self.sent.is_nothing and stored.state in ("finished", "failed"):
            return
        for index, writer in enumerate(self._writers.values()):
            rows, points = writer.rows, writer.points
            if stored is not None and self._wishes.run is not None:
                rows, points = (self.sent.rows, self.sent.points) if index == 0 else (0, 0)
            elif stored is not None:
                # The processes together report what is stored by now, and was not reported before.
                rows = max(0, stored.unreported_rows + self.sent.rows) if index == 0 else 0
                points = max(0, stored.unreported_points + self.sent.points) if index == 0 else 0
            document: dict[str, Any] = {
                "state": "failed" if self.run.state == "failed" else "finished",
                "error": self.run.failure[:10_000].replace("\0", ""),
                "rows_sent": rows,
                "points_sent": points,
                "ends_run": self._wishes.run is None,
            }
            if self.run.finished_at is not None:
                document["finished_at"] = iso_of(self.run.finished_at)
            self._end(writer, document)

    def _end(self, writer: _Writer, document: dict[str, Any]) -> None:
        self._until_free(writer, lambda: self._try_document(writer, "/finish", document))

    def _post(self, method: str, path: str, body: bytes, kind: str = "application/json") -> Any:
        return self._poster.post(method, f"{self.run_id}{path}", body, kind)
