"""The upload of one run: registration, messages, and the end. It goes on where the server's copy ends.

The server says how many messages and values of each writer it has. A process that begins again reads the
files from their start, and passes over as many values. A message has the next number of its writer, so of two
processes that send at once one is refused, and asks the server again.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from fp8scope.delivery.arrow_encoding import CONTENT_TYPE
from fp8scope.delivery.messages import MEDIA_TYPE
from fp8scope.delivery.transport import Backoff, NextAction, SendOutcome
from fp8scope.event_files.log_run import LogRun, PlacedMedia, PlacedValue
from fp8scope.event_files.row_streams import RowStream
from fp8scope.recording.media import joined, logged
from fp8scope.recording.records import Row, dump_json

CLIENT: Final = "tensorboard"
"""The server knows by it that no heartbeats come between two values."""
BACKOFF_BASE, BACKOFF_CAP = 0.5, 15.0
PATIENCE: Final = 2.0
MAX_CONFLICTS: Final = 100
REFUSED_MEDIA: Final = (413, 422)
"""Statuses of a message whose image or text the server does not take, while it takes others."""
ENDED: Final = ("finished", "failed")
SENT: Final = ("rows", "points")


class Sending(Protocol):
    """The part of `delivery.transport.Transport` that an upload needs."""

    def send(self, method: str, path: str, body: bytes, content_type: str = ...) -> SendOutcome:
        """Send one request."""


class SendingRefusedError(RuntimeError):
    """The server refuses every request: the token or the address is wrong. The message says what to do."""


class RunRefusedError(RuntimeError):
    """The server refuses this run; others may go on."""


class _ConflictError(Exception):
    """Another process has sent rows of this writer."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The fields that the run is registered with."""

    id: uuid.UUID
    name: str
    precision: str = "unknown"
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class MediaStream:
    """The images and texts of a writer. `seq`: the number of the next; those below `stored` are stored."""

    writer: str
    seq: int = 0
    stored: int = 0


@dataclass(kw_only=True)
class RunUpload:
    """Sends the values of one directory.

    Attributes:
        say: tells the user something.
        wait: sleeps for so many seconds.
        patience: seconds of waiting for the server after which it is said.
        page: the address of the run's page, once it is registered.
        sent, sent_media: the values, and the images and texts, that this process has sent.
        conflicts: how often another process had sent rows of the run.
        paths: the files of the run.
    """

    description: RunDescription
    directory: Path
    transport: Sending
    say: Callable[[str], None]
    wait: Callable[[float], None] = time.sleep
    patience: float = PATIENCE
    page: str = ""
    sent: int = 0
    sent_media: int = 0
    conflicts: int = 0
    paths: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = LogRun()
        self._streams: dict[str, RowStream] = {}
        self._media_streams: dict[str, MediaStream] = {}
        self._takes_media = False
        self._is_registered = False
        self._state = ""

    def add_files(self, paths: list[Path]) -> None:
        """Add files that are new."""
        self.paths = paths
        self.log.add_files(paths)

    def turn(self) -> bool:
        """Read some values and send them. Returns whether there may be more at once.

        Raises:
            SendingRefusedError, RunRefusedError: the server takes nothing, or nothing of this run.
            OSError: a file cannot be read.
        """
        try:
            return self._turn()
        except _ConflictError:
            self.conflicts += 1
            if self.conflicts > MAX_CONFLICTS:
                raise RunRefusedError(
                    f"{self.description.name}: other processes send the same directory. Stop them."
                ) from None
            # Read everything again, and pass over what the server has by now.
            self.log, self._streams, self._media_streams = LogRun(), {}, {}
            self.log.add_files(self.paths)
            return True

    def _turn(self) -> bool:
        values, has_more = self.log.read()
        if values or (self.log.config_changed and not has_more):
            self._register()
        for value in values:
            if isinstance(value, PlacedMedia):
                self._send_media(value)
                continue
            stream = self._stream_of(value)
            self.sent += stream.add(value)
            if stream.is_full:
                self._flush(stream)
        for stream in self._streams.values():
            self._flush(stream)
        return has_more

    def _register(self) -> None:
        if self._is_registered and not self.log.config_changed:
            return
        first = self.log.first_time_us
        document = {
            "name": self.description.name,
            "precision": self.description.precision,
            "config": self.log.config,
            "environment": {"client": CLIENT, **self.description.environment},
            "created_at": _iso(first) if first is not None else None,
        }
        answer = self._post("PUT", "", dump_json(document))
        self.log.config_changed = False
        if not self._is_registered:
            self._is_registered, self._state = True, str(answer.get("state", ""))
            self._takes_media = "media" in (answer.get("accepts") or ())
            page, self.page = self.page, str(answer.get("url", ""))
            if page != self.page:
                self.say(f"{self.description.name}: {self.page}")

    def _stream_of(self, value: PlacedValue) -> RowStream:
        stream = self._streams.get(value.where.stream)
        if stream is None:
            stream = self._streams[value.where.stream] = RowStream(self.description.id, value)
            stored = self._post("GET", f"/writers/{stream.writer}", b"")
            stream.resume(seq=stored["next_seq"], rows=stored["rows"], points=stored["points"])
            if not stored["next_seq"]:
                self._introduce(stream.writer, stream.attempt, imported=stream.is_late)
        return stream

    def _send_media(self, media: PlacedMedia) -> None:
        """Send an image or a text. Its number is its place among those of its stream, sent or not."""
        if not self._takes_media:
            self.log.left_out.media = self.log.left_out.media or "the server is too old for them"
            return
        stream = self._media_streams.get(media.where.stream)
        if stream is None:
            stream = MediaStream(writer=str(uuid.uuid5(self.description.id, f"{media.where.stream} media")))
            self._media_streams[media.where.stream] = stream
            stored = self._post("GET", f"/writers/{stream.writer}", b"")
            stream.stored = stored["next_seq"]
            if not stream.stored:
                self._introduce(stream.writer, media.where.attempt, imported=True)
        seq, stream.seq = stream.seq, stream.seq + 1
        if seq < stream.stored:
            return
        prepared = logged(media.kind, media.name, media.content, step=media.step, caption="")
        head = {**prepared.head(media.content), "writer": stream.writer, "seq": seq}
        outcome = self._until_answered("POST", "/media", joined(head, media.content), MEDIA_TYPE)
        if outcome.status in REFUSED_MEDIA:
            self.log.left_out.media = outcome.message or outcome.code
            return
        self._check(outcome)
        self.sent_media += outcome.answer.get("status") != "duplicate"

    def _introduce(self, writer: str, attempt: int, *, imported: bool = False) -> None:
        document = {**self._origin(), "attempt": attempt, "imported": imported, "offset": 0, "tensors": []}
        self._post("POST", f"/writers/{writer}/tensors", dump_json(document))

    def _origin(self) -> dict[str, Any]:
        return {"rank": 0, "hostname": str(self.description.environment.get("hostname", ""))[:255]}

    def _flush(self, stream: RowStream) -> None:
        rows = stream.take()
        if rows:
            self._reopen()
            self._send(stream, rows)

    def _send(self, stream: RowStream, rows: list[Row]) -> None:
        batch = stream.encode(self.description.id, rows)
        outcome = self._until_answered("POST", "/batches", batch.body, CONTENT_TYPE)
        if outcome.action is NextAction.HALVE and len(rows) > 1:
            half = len(rows) // 2
            self._send(stream, rows[:half])
            self._send(stream, rows[half:])
            return
        self._check(outcome)
        stream.acknowledge(batch)

    def _reopen(self) -> None:
        """Say that a run that had ended goes on, by a writer of a new attempt, which sends nothing."""
        if self._state not in ENDED:
            return
        run = self._post("GET", "", b"")
        self._state = "running"
        if run.get("state") in ENDED:
            number = int(run.get("last_attempt") or 0) + 1
            self._introduce(self._sign_of_life(number), number)

    def _sign_of_life(self, number: int) -> str:
        return str(uuid.uuid5(self.description.id, f"goes on {number}"))

    def finish(self) -> None:
        """Say that the run has ended, with its last value. Nothing happens if that was said before.

        Raises:
            SendingRefusedError, RunRefusedError: as `turn`.
        """
        if not self._is_registered or self._state in ENDED:
            return
        run = self._post("GET", "", b"")
        # What the run has had at earlier ends is counted already.
        missing = {name: int(run[f"{name}_stored"]) - int(run[f"{name}_sent"] or 0) for name in SENT}
        for stream in sorted(self._streams.values(), key=lambda stream: stream.attempt):
            self._finish(stream.writer, stream.seq, missing)
            stream.seq += 1
            missing = dict.fromkeys(SENT, 0)
        # Only what a writer of the last attempt says ends a run.
        last = self._sign_of_life(int(run.get("last_attempt") or 0))
        stored = self._post("GET", f"/writers/{last}", b"")
        if stored["attempt"] is not None:
            self._finish(last, stored["next_seq"], missing)
        self._state = "finished"

    def _finish(self, writer: str, seq: int, sent: Mapping[str, int]) -> None:
        document = {
            "writer": writer,
            "seq": seq,
            "state": "finished",
            "error": "",
            "rows_sent": sent["rows"],
            "points_sent": sent["points"],
            "dropped": 0,
            "errors": 0,
            "finished_at": _iso(self.log.last_time_us),
        }
        self._post("POST", "/finish", dump_json(document))

    # Requests

    def _post(self, method: str, path: str, body: bytes) -> Mapping[str, Any]:
        outcome = self._until_answered(method, path, body, "application/json")
        self._check(outcome)
        return outcome.answer

    def _until_answered(self, method: str, path: str, body: bytes, kind: str) -> SendOutcome:
        """Send a request until the server decides, however long it is away."""
        backoff, began, has_said = Backoff(BACKOFF_BASE, BACKOFF_CAP), time.monotonic(), False
        while True:
            outcome = self.transport.send(method, f"/runs/{self.description.id}{path}", body, kind)
            if outcome.action not in (NextAction.WAIT, NextAction.RETRY):
                if has_said:
                    self.say("the server is back")
                return outcome
            if not has_said and time.monotonic() - began >= self.patience:
                has_said = True
                self.say(f"the server does not take values: {outcome.message or outcome.status}; waiting")
            self.wait(max(outcome.wait or 0.0, backoff.next(), 0.05))

    def _check(self, outcome: SendOutcome) -> None:
        if outcome.action is NextAction.DONE:
            return
        message = outcome.message or outcome.code or f"HTTP {outcome.status}"
        if outcome.action in (NextAction.NEW_WRITER, NextAction.REGISTER):
            # Another process sends the directory; or the run was deleted, and starts again.
            self._is_registered = False
            raise _ConflictError
        if outcome.status == 404 and outcome.code == "not_found":
            raise SendingRefusedError("the server is older than this command: update it.")
        if outcome.action is NextAction.HOLD and outcome.status != 409:
            raise SendingRefusedError(message)
        raise RunRefusedError(f"{self.description.name}: {message}")


def _iso(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat()
