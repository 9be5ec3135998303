"""The path of an entry from the training thread to the server, and the threads along it.

    training thread --put--> queue --recorder--> spool --sender--> server
                                                   ^-- flusher: periodic fsync

`put` never waits for the device or the network; it waits for the disk only within the bounds described in
`fp8scope.recording.recorder`. The recorder never uses the network, so a network problem cannot keep a
finished step out of the spool.
"""

import contextlib
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8scope.config import Settings
from fp8scope.delivery.cursor import Cursor, SendProgress
from fp8scope.delivery.inbox import DocumentSink
from fp8scope.delivery.sender import Sender
from fp8scope.guard import Guard
from fp8scope.observe.budget import LAG_SECONDS
from fp8scope.process.threads import Worker
from fp8scope.recording.console import ConsoleLog
from fp8scope.recording.entries import Catalogue, Document, Origin, SpoolEntry
from fp8scope.recording.finish_report import FinishReport
from fp8scope.recording.media_queue import MediaQueue
from fp8scope.recording.recorder import POLL_SECONDS, Recorder
from fp8scope.recording.records import RecordKind, dump_json
from fp8scope.recording.segments import Owner
from fp8scope.recording.spool import Spool
from fp8scope.session.leftovers import count_lost

logger = logging.getLogger("fp8scope")

IDLE_SECONDS = 5.0
CLOSING_PAUSE = 1.0
UNREACHABLE_SECONDS = 1.0
"""Seconds that the end of the program waits for a server that does not answer."""
LOOK_OFTEN, LOOK_SELDOM = 0.002, 0.1
DOZE_AFTER = 1.0
"""While steps arrive, the recorder polls for them a few times per step, at an interval within LOOK_OFTEN and
LOOK_SELDOM. After DOZE_AFTER seconds without one it sleeps until it is woken.
"""


def console_entry(document: Mapping[str, Any]) -> Document:
    """A document of the console log, for the spool."""
    return Document(RecordKind.REPORT, lambda: dump_json(document))


def media_entry(payload: bytes) -> Document:
    """A message with media, for the spool."""
    return Document(RecordKind.MEDIA, lambda: payload)


class Pipeline:
    """One writer of a run: a queue, a spool and their threads. The first `put` starts them."""

    def __init__(
        self,
        settings: Settings,
        run: str,
        guard: Guard,
        *,
        origin: Origin | None = None,
        writer: str | None = None,
        child: bool = False,
        on_alerts: DocumentSink = lambda alerts: None,
        on_commands: DocumentSink | None = None,
        on_page: Callable[[str], None] = lambda page: None,
        console: ConsoleLog | None = None,
        media: MediaQueue | None = None,
    ) -> None:
        self.writer = writer or str(uuid.uuid4())
        self.directory = settings.directory / run / self.writer
        self.sender: Sender | None = None
        self.started = False
        self.lag = 0
        """Entries that may wait while the training goes on; see `observe.budget`."""
        self._settings = settings
        self._run = run
        self._child = child
        self._guard = guard
        self._on_alerts = on_alerts
        self._on_commands = on_commands
        self._on_page = on_page
        self._console = console
        self._media = media
        self._console_at = time.monotonic()
        self._queue = Recorder(settings, guard, origin or Origin(), self._send_soon)
        self.waiting = self._queue.waiting
        """Entries that were put and are not yet recorded."""
        self._closing = False
        self._dozing = False
        """Whether the recorder must be woken; otherwise it polls again soon."""
        self._gap = self._last = 0.0
        self.spool: Spool | None = None
        self._cursor: Cursor | None = None
        self._complete = False
        self._keeping = threading.Lock()
        """Held while `_keep` moves the rest of the spool from memory to the disk."""
        self._kept = False
        self._recorder = Worker("recorder", self._record, guard, self._recorder_ended)
        self.sending = Worker("sender", self._send, guard, self._sender_ended)
        self._flusher = Worker("flusher", self._flush, guard)

    def put(self, entry: SpoolEntry | Catalogue) -> None:
        """Queue an entry. All earlier entries are written when this returns, unless the disk is slower than
        the bounds of `fp8scope.recording.recorder`.
        """
        self.waiting.append(entry)
        if not self.started:
            self._start()
        # An entry leaves the queue after the write, so one whose write is in progress still counts here.
        elif len(self.waiting) > 1 + self.lag:
            self._queue.catch_up()
        if self._dozing:
            self._recorder.wake()

    def _start(self) -> None:
        self.started = True
        self._open()
        self._recorder.start()

    def note_media(self) -> None:
        """Have the recorder take the media that wait."""
        if not self.started:
            self._start()
        elif self._dozing:
            self._recorder.wake()

    def settle(self, device_seconds: float = 0.0) -> None:
        """Write all queued entries, within the same bounds as `put`.

        `device_seconds`: the time to wait for entries whose values are still on a device. Only at the end of
        a run: a training that goes on must not wait for its device.
        """
        if not self.started:
            return
        deadline = time.monotonic() + device_seconds
        self._queue.catch_up(but=0)
        while self._queue.waits_for_device() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._queue.catch_up(but=0)

    def prepare(self, entry: SpoolEntry) -> None:
        """Queue an entry without starting the threads: it is recorded only if a `put` follows."""
        self._queue.add(entry)

    def is_full(self, row_bytes: int) -> bool:
        """Return whether the queue is full, assuming entries of `row_bytes` bytes."""
        return self._queue.is_full(row_bytes)

    @property
    def recording(self) -> threading.Lock:
        """The lock that is held while an entry is being recorded."""
        return self._queue.lock

    def write_out(self) -> None:
        """Write and fsync all queued entries. Waits for device and disk, so not for the training thread."""
        if self.started:
            self._record_media(self._queue.add_now)
            self._queue.drain()
            self._flush()

    # The recorder's thread

    def _record(self) -> float:
        closing = self._closing
        if self._queue.drain():
            now = time.monotonic()
            self._gap, self._last = now - self._last, now
        if self._console is not None and not closing:
            self._record_console(self._console)
        # Waking a thread is a third of the agent's cost per step, so this thread polls while steps arrive. If
        # steps are too short for that, the training thread writes them itself.
        pause = max(self._gap / 4, LAG_SECONDS / 2 if self.lag else LOOK_OFTEN)
        self._dozing = time.monotonic() - self._last > DOZE_AFTER
        if self._dozing:
            # Drain once more: an entry may have been put just before `_dozing` was set.
            self._queue.drain()
        if not closing:
            # Once dozing, so that what comes later wakes this thread.
            self._record_media(self._queue.add_now)
        if closing and not self.waiting:
            self._recorder.stop()
        if closing:
            return 0.0
        if not self._dozing:
            return min(pause, LOOK_SELDOM)
        return IDLE_SECONDS if self._console is None else min(IDLE_SECONDS, self._console.interval)

    def _record_console(self, console: ConsoleLog) -> None:
        """Record what the program has written, at intervals."""
        now = time.monotonic()
        if self.spool is not None and now - self._console_at >= console.interval:
            self._console_at = now
            for document in console.take(keep=self.spool.has_room()):
                self._queue.add_now(console_entry(document))

    def _record_media(self, record: Callable[[SpoolEntry], None]) -> None:
        if self._media is not None and self.spool is not None:
            self._media.drain(self.writer, self.spool.has_room, lambda payload: record(media_entry(payload)))

    def _open(self) -> None:
        """Open the spool, in memory if the directory is unusable, and start the sender and the flusher."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Take the lock first, so that `fp8scope sync` does not treat this as the spool of a dead process.
            self.spool = self._new_spool(self.directory)
            self._cursor = Cursor(self.directory / "cursor", SendProgress(writer=self.writer))
        except Exception as error:
            self._guard.error("opening the spool", f"{error}; data is kept in memory only", error)
            if self.spool is not None:
                self.spool.close()
            # Nothing could be sent from a partial spool.
            shutil.rmtree(self.directory, ignore_errors=True)
            self.spool, self._cursor = self._new_spool(None), Cursor(None, SendProgress(writer=self.writer))
        self._queue.spool = self.spool
        if self._settings.mode == "online":
            self.sender = Sender(
                self._run,
                self.spool,
                self._cursor,
                self._settings,
                self._guard,
                on_alerts=self._on_alerts,
                on_commands=self._on_commands,
                on_page=self._on_page,
            )
            self.sending.start()
        self._flusher.start()

    def _new_spool(self, directory: Path | None) -> Spool:
        return Spool(
            directory,
            max_bytes=self._settings.spool_bytes,
            memory_bytes=self._settings.memory_bytes,
            preamble=self._queue.preamble,
            owner=Owner.me(child=self._child),
            durable=self._settings.fsync_seconds == 0,
            on_disk=self._disk_changed,
        )

    def _disk_changed(self, error: OSError | None) -> None:
        if error is not None:
            text = "steps cannot be written to disk (%s): they are kept in memory, and lost with the process."
            self._guard.warn_once("disk", text, error.strerror or error)
        elif self._guard.is_first("disk again"):
            logger.info("steps are written to disk again, including those that were kept in memory.")

    def _recorder_ended(self) -> None:
        self._flusher.stop()
        if self._settings.mode == "online":
            self.sending.wake()
        elif self.spool is not None and self._cursor is not None:
            self._keep()
            self.spool.close()
            self._cursor.close()

    def _send_soon(self, end: int) -> None:
        """Have the sender send all records up to `end` now. Called by the thread that recorded them."""
        if self.sender is not None and self.sender.hasten(end):
            self.sending.wake()

    # The sender's and the flusher's threads

    def _send(self) -> float:
        assert self.sender is not None
        sender = self.sender
        recorded = self._recorder.has_ended()
        pause = sender.advance()
        if recorded:
            # `_keep` empties the spool for a moment: that does not mean that everything was sent.
            with self._keeping:
                if sender.is_done():
                    self._complete = True
            if self._complete:
                self.sending.stop()
            pause = min(pause, CLOSING_PAUSE)
        return pause

    def _sender_ended(self) -> None:
        assert self.sender is not None and self.spool is not None and self._cursor is not None
        self.sender.close()
        self._cursor.close()
        if self._complete and not self._cursor.progress.messages_refused:
            self.spool.remove()
            with contextlib.suppress(OSError):
                # Fails while other writers still have folders in it; the last one removes it.
                self.directory.parent.rmdir()
        else:
            self._keep()
            self.spool.close()

    def _keep(self) -> None:
        """Move what is in memory to the disk, because nothing more will be sent.

        Rows that do not fit are counted as lost, here and in the FINISH record.
        """
        if self.spool is None or self._cursor is None:
            return
        with self._keeping, self._guard.shield("keeping what was not sent"):
            if self._kept:
                return
            self._kept = True
            lost = self.spool.rescue()
            if not lost:
                return
            finish_document = count_lost(lost, self._guard, self.spool.trouble)
            progress = self._cursor.progress
            following = self.spool.read(progress.position)
            if progress.sealed_end and (following is None or following.begin >= progress.sealed_end):
                # No record of the sealed message is left: the next message is a different one.
                progress.sealed_end, progress.sealed_digest = 0, ""
                self._cursor.save()
            if finish_document and self.spool.directory is not None:
                self.spool.end_with(RecordKind.FINISH, finish_document)

    def _flush(self) -> float:
        if self.spool is not None:
            self.spool.flush()
        return self._settings.fsync_seconds or IDLE_SECONDS

    # The end

    def finish(
        self, document: Callable[[], Mapping[str, Any]] | None, timeout: float, *, leaving: bool = False
    ) -> FinishReport:
        """Record the end of this writer, and wait until the server has answered everything.

        No end is recorded if `document` is None. Returns after `timeout` seconds at the latest, and if
        `leaving`, after UNREACHABLE_SECONDS where nothing answers; unsent data stays in the spool.
        """
        self.close(document)
        return self.wait(timeout, leaving=leaving)

    def close(self, document: Callable[[], Mapping[str, Any]] | None) -> None:
        """Record the end of this writer without waiting; the threads end once everything is answered."""
        if self.started and not self._closing:
            if self._console is not None and self.spool is not None:
                # Before the end, whatever it is: the last lines tell of a failure.
                for lines in self._console.take(keep=self.spool.has_room(), final=True):
                    self.put(console_entry(lines))
            self._record_media(self.put)
            if document is not None:
                self.put(Document(RecordKind.FINISH, lambda: dump_json(document())))
            self._closing = True
            self._recorder.wake()

    def wait(self, timeout: float, *, leaving: bool = False) -> FinishReport:
        """After `close`, wait for the threads to end, for at most `timeout` seconds; see `finish`."""
        began = time.monotonic()
        deadline = began + timeout
        if not self.started:
            return FinishReport(complete=True)
        if self._recorder.join(deadline) and self.sender is not None:
            self.sender.hurry, self.sender.held = True, False
            self.sending.wake()
            while not self.sending.join(min(deadline, time.monotonic() + 0.05)):
                now = time.monotonic()
                if now >= deadline or self.sender.held:
                    break
                if leaving and self.sender.is_unreachable and now - began >= UNREACHABLE_SECONDS:
                    break
            self.sending.stop()
            if not self.sending.join(min(deadline, time.monotonic() + 1.0)):
                # The sender still waits for an answer, and the process may exit before it arrives.
                self._keep()
        elif left := len(self.waiting):
            self._guard.error(
                "writing to the disk", f"the disk does not respond; {left} records are not written"
            )
        return self._report()

    def _report(self) -> FinishReport:
        progress = self._cursor.progress if self._cursor is not None else SendProgress(writer=self.writer)
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

    def discard(self) -> bool:
        """End and delete all data of this writer. Returns False if the server already knows the run."""
        if self.sender is not None and self.sender.page:
            return False
        self._recorder.stop()
        self._recorder.join(time.monotonic() + CLOSING_PAUSE)
        self._complete = True
        self.sending.stop()
        if self.sender is None and self.spool is not None:
            self.spool.remove()
        return True

    def abandon(self) -> None:
        """Close the parent's files in a forked child, without changing them."""
        if self.spool is not None:
            self.spool.abandon()
        if self._cursor is not None:
            self._cursor.close()
