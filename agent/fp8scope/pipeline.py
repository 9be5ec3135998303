"""The agent's threads: what a training thread hands over is recorded in the spool, then sent.

    training thread --put--> queue --recorder--> spool --sender--> server
                                                   ^-- flusher: fsync now and then

`put` waits for nothing and nobody. The recorder does nothing but write, so that a finished step is in the
spool within moments whatever the network does.
"""

import contextlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fp8scope.config import Settings
from fp8scope.cursor import Cursor, Progress
from fp8scope.guard import Guard
from fp8scope.records import Kind, dump_json
from fp8scope.sender import AlertSink, Sender
from fp8scope.spool import Spool, SpoolFullError
from fp8scope.worker import Worker

IDLE_SECONDS = 5.0
HELP_SECONDS = 0.02
HELP_SHARE = 0.01
"""The training thread spends at most this share of the run, and HELP_SECONDS, on waiting for the recorder."""
CLOSING_PAUSE = 1.0


class Pending(Protocol):
    """Values that are on their way from a device."""

    def is_ready(self) -> bool:
        """Whether they have arrived."""

    def wait(self) -> None:
        """Wait until they have."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something for the spool; `payload` makes its bytes once `wait` has returned."""

    kind: Kind
    payload: Callable[[], bytes]
    source: Pending | None = None
    """What `payload` reads from a device."""

    def is_ready(self) -> bool:
        return self.source is None or self.source.is_ready()

    def wait(self) -> None:
        if self.source is not None:
            self.source.wait()


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tensors from `offset` on, and the names of their statistics."""

    offset: int
    tensors: Sequence[Mapping[str, Any]]
    statistics: Sequence[str]

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class FinishReport:
    """How a run ended. `complete`: the server has acknowledged everything that was recorded."""

    complete: bool
    rows_sent: int = 0
    points_sent: int = 0
    rows_dropped: int = 0
    messages_refused: int = 0
    errors: int = 0
    directory: Path | None = None
    """Where what is left lies, for `fp8scope sync`; None when nothing is left."""


class Pipeline:
    """One writer of a run: a queue, a spool and their threads, started with the first `put`."""

    def __init__(
        self,
        settings: Settings,
        run: str,
        guard: Guard,
        *,
        rank: int = 0,
        hostname: str = "",
        writer: str | None = None,
        on_alerts: AlertSink = lambda alerts: None,
    ) -> None:
        self.writer = writer or str(uuid.uuid4())
        self.directory = settings.directory / run / self.writer
        self.sender: Sender | None = None
        self.started = False
        self._settings = settings
        self._run = run
        self._guard = guard
        self._place = {"rank": rank, "hostname": hostname}
        self._on_alerts = on_alerts
        self._queue: deque[Entry | Catalogue] = deque()
        self._recording = threading.Lock()
        """Held by whoever takes from the queue and appends to the spool."""
        self._closing = False
        self._began = time.monotonic()
        self._helped = 0.0
        self._registration = b""
        self._tensors: list[Mapping[str, Any]] = []
        self._statistics: Sequence[str] = ()
        self._tensors_recorded = 0
        self._spool: Spool | None = None
        self._cursor: Cursor | None = None
        self._complete = False
        self._recorder = Worker("recorder", self._record, guard, self._recorder_ended)
        self._sending = Worker("sender", self._send, guard, self._sender_ended)
        self._flusher = Worker("flusher", self._flush, guard)

    def put(self, entry: Entry | Catalogue) -> None:
        """Hand something over. Waits for neither device nor network, nor for a disk that is slow."""
        self._queue.append(entry)
        if not self.started:
            self.started = True
            self._open()
            self._recorder.start()
        elif len(self._queue) > 1:
            self._help()
        self._recorder.wake()

    def prepare(self, entry: Entry) -> None:
        """Queue something that is worth recording only if something else follows."""
        self._queue.append(entry)

    def is_full(self, row_bytes: int) -> bool:
        """Whether the queue has reached its bound, were its entries rows of this size."""
        waiting = len(self._queue)
        return waiting >= self._settings.queue_rows or waiting * row_bytes > self._settings.memory_bytes

    def _help(self) -> None:
        """Record on the training thread what the recorder did not get to since the last step.

        Steps that are shorter than a switch of threads would pile up in the queue and die with the process.
        When the recorder is at it already, wait for it within a budget: a slow disk must not slow training.
        """
        began = time.monotonic()
        budget = HELP_SECONDS + HELP_SHARE * (began - self._began) - self._helped
        if self._recording.acquire(timeout=min(max(budget, 0.0), HELP_SECONDS)):
            try:
                with self._guard.shield("recording"):
                    self._drain()
            finally:
                self._recording.release()
        self._helped += time.monotonic() - began

    # The recorder's thread

    def _record(self) -> float:
        closing = self._closing
        while (first := self._first()) is not None:
            # Not under the lock: the training thread may ask for it, and must not wait for its own device.
            first.wait()
            with self._recording:
                self._drain()
        if closing:
            self._recorder.stop()
        return IDLE_SECONDS

    def _first(self) -> Entry | Catalogue | None:
        try:
            return self._queue[0]
        except IndexError:
            return None

    def _drain(self) -> None:
        """Record what is in the queue up to the first entry that a device still works on."""
        while self._queue and self._queue[0].is_ready():
            entry = self._queue.popleft()
            if isinstance(entry, Catalogue):
                self._tensors[entry.offset :] = entry.tensors
                self._statistics = entry.statistics
            else:
                with self._guard.shield(f"recording ({entry.kind.name.lower()})"):
                    self._record_entry(entry)

    def _record_entry(self, entry: Entry) -> None:
        assert self._spool is not None
        try:
            payload = entry.payload()
            if entry.kind is Kind.REGISTRATION:
                self._registration = payload
            if entry.kind is Kind.ROW and self._tensors_recorded < len(self._tensors):
                self._spool.append(Kind.TENSORS, self._catalogue_payload(self._tensors_recorded))
                self._tensors_recorded = len(self._tensors)
            self._spool.append(entry.kind, payload)
        except Exception as error:
            if entry.kind is Kind.ROW:
                self._guard.drop(1, str(error))
            if entry.kind is not Kind.ROW or not isinstance(error, SpoolFullError):
                raise

    def _catalogue_payload(self, offset: int) -> bytes:
        tensors = self._tensors[offset:]
        return dump_json(
            {**self._place, "offset": offset, "tensors": tensors, "statistics": list(self._statistics)}
        )

    def _preamble(self) -> list[tuple[Kind, bytes]]:
        """What each segment of the spool begins with, so that it can be read without those before it."""
        head = [(Kind.REGISTRATION, self._registration)] if self._registration else []
        if self._tensors_recorded:
            recorded = dump_json(
                {
                    **self._place,
                    "offset": 0,
                    "tensors": self._tensors[: self._tensors_recorded],
                    "statistics": list(self._statistics),
                }
            )
            head.append((Kind.TENSORS, recorded))
        return head

    def _open(self) -> None:
        """Open the spool and start the threads behind it. An unusable directory means: in memory only."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The lock comes first: `fp8scope sync` must not take this for the spool of a dead process.
            self._spool = self._new_spool(self.directory)
            self._cursor = Cursor(self.directory / "cursor", Progress(self.writer))
        except Exception as error:
            self._guard.error("opening the spool", f"{error}; what is seen is kept in memory only", error)
            self._spool, self._cursor = self._new_spool(None), Cursor(None, Progress(self.writer))
        if self._settings.mode == "online":
            self.sender = Sender(
                self._run, self._spool, self._cursor, self._settings, self._guard, on_alerts=self._on_alerts
            )
            self._sending.start()
        self._flusher.start()

    def _new_spool(self, directory: Path | None) -> Spool:
        return Spool(
            directory,
            max_bytes=self._settings.spool_bytes,
            memory_bytes=self._settings.memory_bytes,
            preamble=self._preamble,
        )

    def _recorder_ended(self) -> None:
        self._flusher.stop()
        if self._settings.mode == "online":
            self._sending.wake()
        elif self._spool is not None and self._cursor is not None:
            self._spool.close()
            self._cursor.close()

    # The sender's and the flusher's threads

    def _send(self) -> float:
        assert self.sender is not None
        sender = self.sender
        recorded = self._recorder.has_ended()
        pause = sender.advance()
        if recorded:
            if sender.is_done():
                self._complete = True
                self._sending.stop()
            pause = min(pause, CLOSING_PAUSE)
        return pause

    def _sender_ended(self) -> None:
        assert self.sender is not None and self._spool is not None and self._cursor is not None
        self.sender.close()
        self._cursor.close()
        if self._complete and not self._cursor.progress.messages_refused:
            self._spool.remove()
            with contextlib.suppress(OSError):
                # The run's folder goes with its last writer; it is not empty before.
                self.directory.parent.rmdir()
        else:
            self._spool.close()

    def _flush(self) -> float:
        if self._spool is not None:
            self._spool.flush()
        return self._settings.fsync_seconds

    # The end

    def finish(self, document: Callable[[], Mapping[str, Any]] | None, timeout: float) -> FinishReport:
        """Record the end of the run (None: only this writer ends), and wait until everything was answered.

        Returns after `timeout` seconds at the latest; what is left then stays in the spool.
        """
        deadline = time.monotonic() + timeout
        if not self.started:
            return FinishReport(complete=True)
        if document is not None:
            self.put(Entry(Kind.FINISH, lambda: dump_json(document())))
        self._closing = True
        self._recorder.wake()
        if self._recorder.join(deadline) and self.sender is not None:
            self.sender.hurry, self.sender.held = True, False
            self._sending.wake()
            while not self._sending.join(min(deadline, time.monotonic() + 0.05)):
                if time.monotonic() >= deadline or self.sender.held:
                    break
            self._sending.stop()
            self._sending.join(min(deadline, time.monotonic() + 1.0))
        return self._report()

    def _report(self) -> FinishReport:
        progress = self._cursor.progress if self._cursor is not None else Progress(self.writer)
        left = not self._complete or progress.messages_refused > 0
        return FinishReport(
            complete=self._complete,
            rows_sent=progress.rows_sent,
            points_sent=progress.points_sent,
            rows_dropped=self._guard.dropped,
            messages_refused=progress.messages_refused,
            errors=self._guard.errors,
            directory=self.directory if left and self.directory.exists() else None,
        )

    def abandon(self) -> None:
        """In a forked child: let go of the parent's files without touching what is in them."""
        if self._spool is not None:
            self._spool.abandon()
        if self._cursor is not None:
            self._cursor.close()
