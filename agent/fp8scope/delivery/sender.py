"""Reads the spool and delivers every message to the server exactly once.

One message is in flight at a time. Before it is sent it is *sealed*: the cursor stores which records it
consists of. A retry, even by another process after a crash, therefore sends the same message.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fp8scope.config import Settings
from fp8scope.delivery.cursor import Cursor
from fp8scope.delivery.handshake import Handshake
from fp8scope.delivery.inbox import DocumentSink, Inbox
from fp8scope.delivery.messages import Message, Reader, write_refused
from fp8scope.delivery.transport import Backoff, NextAction, SendOutcome, Transport
from fp8scope.guard import Guard
from fp8scope.recording.records import Record, RecordKind, dump_json, load_json
from fp8scope.recording.spool import Spool

logger = logging.getLogger("fp8scope")

OPTIONAL_REPORTS = frozenset({"console"})
"""Reports that are left out if the server does not say that it accepts them."""
MEDIA = "media"
"""Images, texts, tables and files, the same."""
MATRIX = "evaluation_matrix"
"""Cells of the evaluation matrix, the same: an older server would take them for scores of the run."""
ANSWER_SECONDS = 0.5
"""The next message, or a heartbeat, follows an urgent one after this time: its answer has the alert."""
URGENT_PAUSE = 0.2
"""The least time between two urgent messages, as a share of the interval: a condition may last for long."""
MAX_URGENT, INTERVALS_PER_URGENT = 100, 2.0
"""So many urgent messages may follow each other; then one for so many intervals."""
MIN_PAUSE, MAX_LOAD = 0.3, 0.02
"""Batches follow each other after the first share of the interval, if sending takes at most the second
share of this thread's time and the server asks for no longer pause. The interval is the longest pause."""
LEARNING = 0.2
"""Weight of the last message in the mean cost of one: a message that was interrupted changes little."""


class Sender:
    """Sends the records of one spool. Call `advance` in a loop and wait as long as it says."""

    def __init__(
        self,
        run: str,
        spool: Spool,
        cursor: Cursor,
        settings: Settings,
        guard: Guard,
        *,
        on_alerts: DocumentSink = lambda alerts: None,
        on_commands: DocumentSink | None = None,
        on_page: Callable[[str], None] = lambda page: None,
        live: bool = True,
    ) -> None:
        self.run = run
        self.spool = spool
        self.cursor = cursor
        self.trouble = ""
        """Why sending fails at the moment; empty while it works."""
        self.held = False
        """Whether the last attempt failed with an error that only a person can fix."""
        self.is_unreachable = False
        """Whether nothing answered the last attempt."""
        self._settings = settings
        self._guard = guard
        self.hurry = not live
        """Send records at once instead of waiting for a larger batch."""
        # Only a live training can execute commands.
        self._inbox = Inbox(guard, on_alerts, on_commands if live else None)
        self.listening = False
        """Whether to ask for commands often, because the run waits for one."""
        self._live = live
        self._on_page = on_page
        self._transport = Transport(settings)
        self._reader = Reader(run, spool, settings)
        self._handshake = Handshake(run, self._transport, self._reader)
        self._backoff = Backoff(settings.backoff_base, settings.backoff_cap)
        self._heartbeat_at = time.monotonic() + settings.heartbeat_seconds
        self._batch_at = 0.0
        self._suits_server: float | None = None
        """The pause for which the answer to the last batch asks."""
        self._computing = 0.0
        """The mean processor time of a message, in seconds."""
        self._is_urgent = False
        """Whether the message that is being sent is urgent."""
        self._is_hastened = False
        """Whether the thread that sends was woken for the next urgent message."""
        self._urgent_end = 0
        """Records before this position are sent at once, within the bounds of URGENT_PAUSE and MAX_URGENT."""
        self._urgent_at = 0.0
        self._urgent_budget, self._urgent_sent = float(MAX_URGENT), time.monotonic()
        self._introduce_at = time.monotonic() + settings.introduce_seconds
        self._errors_reported = 0
        for record in spool.preamble_before(cursor.progress.position):
            self._reader.learn(record)

    def advance(self) -> float:
        """Do the next task that is due. Returns the seconds to wait before the next call."""
        if self._is_hastened and self._urgent_end <= self.cursor.progress.position:
            # The records were sent between the moments when they were written and when `hasten` was called.
            self._expect_alert(time.monotonic())
        record = self._next_record()
        if record is None:
            return self._idle()
        if record.kind in (RecordKind.REGISTRATION, RecordKind.TENSORS):
            self._reader.learn(record)
            self.cursor.progress.position = record.end
            return 0.0
        if (pause := self._introduce()) is not None:
            return pause
        if not self._is_accepted(record):
            self._unseal()
            self.cursor.progress.position = record.end
            return 0.0
        if (pause := self._until_batch(record)) > 0:
            return pause
        began, computing = time.monotonic(), time.thread_time()
        self._is_urgent = record.begin < self._urgent_end
        message = self._reader.build(record, self.cursor.progress)
        self._batch_at = began + self._settings.interval
        self._suits_server = None
        pause = self._deliver(message)
        now = time.monotonic()
        self._batch_at = began + self._pause_after(now - began, time.thread_time() - computing)
        if self._is_urgent:
            self._expect_alert(now)
        return pause

    def _expect_alert(self, now: float) -> None:
        """An urgent message was sent, or tried: soon ask for the alert, which its own answer cannot have."""
        self._note_urgent(now)
        self._batch_at = min(self._batch_at, now + ANSWER_SECONDS)
        self._heartbeat_at = min(self._heartbeat_at, now + ANSWER_SECONDS)

    def _pause_after(self, seconds: float, computing: float) -> float:
        """The time between two batches, when the last one took so many seconds, and so many of a processor.

        A server that says nothing of a pause is one of an earlier version: then its answers' delay tells how
        busy it is.
        """
        self._computing += LEARNING * (computing - self._computing)
        for_server = seconds / MAX_LOAD if self._suits_server is None else self._suits_server
        wanted = max(MIN_PAUSE * self._settings.interval, self._computing / MAX_LOAD, for_server)
        return min(self._settings.interval, wanted)

    def _note_urgent(self, now: float) -> None:
        """The next urgent message waits for its turn."""
        self._is_hastened = False
        interval = self._settings.interval
        earned = (now - self._urgent_sent) / max(INTERVALS_PER_URGENT * interval, 1e-9)
        self._urgent_budget = min(self._urgent_budget + earned, float(MAX_URGENT)) - 1.0
        self._urgent_sent = now
        missing = max(0.0, 1.0 - self._urgent_budget)
        self._urgent_at = now + interval * max(URGENT_PAUSE, missing * INTERVALS_PER_URGENT)

    def _is_accepted(self, record: Record) -> bool:
        """Return whether the server knows this. Older ones know no console log, matrix or media."""
        if record.kind is RecordKind.MEDIA:
            if MEDIA not in self._handshake.accepts:
                self._guard.warn_once("media", "the server is too old for media; they are not sent.")
                return False
            return True
        if record.kind not in (RecordKind.REPORT, RecordKind.EVALUATION):
            return True
        document = load_json(record.payload)
        if record.kind is RecordKind.EVALUATION:
            if "matrix" not in document or MATRIX in self._handshake.accepts:
                return True
            logger.warning("The server is too old for the evaluation matrix; its scores are not sent.")
            return False
        kind = document.get("kind")
        return kind not in OPTIONAL_REPORTS or kind in self._handshake.accepts

    def hasten(self, end: int) -> bool:
        """Send the records before the position `end` as soon as `advance` may, if sending works.

        Returns whether to call `advance` at once, which sends them or says when. Any thread may call it.
        """
        self._urgent_end = end
        # Waking a thread is expensive: once for each message.
        is_first, self._is_hastened = not self._is_hastened, True
        return is_first and not self.trouble

    @property
    def page(self) -> str:
        """The address of the run's page; empty until the run is registered."""
        return self._handshake.page

    @property
    def margin(self) -> float | None:
        """The project's margin; None until the run is registered."""
        return self._handshake.margin

    def is_done(self) -> bool:
        """Return whether the server knows the run and has answered everything in the spool."""
        return self._next_record() is None and self._handshake.run_is_known

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    # Choosing the next message

    def _next_record(self) -> Record | None:
        return self.spool.read(self.cursor.progress.position)

    def _until_batch(self, first: Record) -> float:
        """Return the seconds to wait for more rows before sending the next batch."""
        waiting = self.spool.end - first.begin
        if self.hurry or self.cursor.progress.sealed_end or waiting >= self._settings.batch_bytes // 8:
            return 0.0
        due = self._batch_at
        if first.begin < self._urgent_end:
            due = min(due, self._urgent_at)
        return due - time.monotonic()

    # Sending a message

    def _introduce(self) -> float | None:
        """Continue the handshake. Returns the seconds to wait, or None if the handshake is complete."""
        if self._handshake.is_complete:
            return None
        outcome = self._handshake.send_next(self.cursor.progress)
        if outcome.action is not NextAction.DONE:
            return self._put_off(outcome)
        self._on_page(self.page)
        self._on_success()
        return 0.0

    def _deliver(self, message: Message) -> float:
        progress = self.cursor.progress
        body_differs = progress.sealed_end != 0 and progress.sealed_digest != message.digest
        if progress.sealed_end == 0:
            progress.sealed_end, progress.sealed_digest = message.end, message.digest
            self._save(durable=True)
        path = f"/runs/{self.run}/{message.path}{self._inbox.query(progress)}"
        if self._is_urgent and message.kind is RecordKind.ROW:
            path += "&urgent=1"
        outcome = self._post(message, path)
        if outcome.action is NextAction.DONE and self._is_for(outcome.answer, progress.seq):
            return self._acknowledge(message, outcome.answer)
        if outcome.action is NextAction.NEW_WRITER and body_differs:
            # Another version of Arrow encodes the same rows in different bytes. The server already has the
            # message, as an earlier process sent it.
            return self._acknowledge(message, {})
        if outcome.action is NextAction.HALVE and message.records > 1:
            self._unseal()
            self._reader.row_limit = max(1, message.records // 2)
            return 0.0
        if outcome.action in (NextAction.SET_ASIDE, NextAction.HALVE):
            return self._set_aside(message, outcome)
        if outcome.action is NextAction.DONE:
            outcome = SendOutcome(action=NextAction.RETRY, message="the response belongs to another message")
        return self._put_off(outcome)

    def _post(self, message: Message, path: str) -> SendOutcome:
        """Send a message; one with a large content first without it."""
        if message.shorter:
            outcome = self._transport.send("POST", path, message.shorter, message.content_type)
            if outcome.code != "content_needed":
                return outcome
        return self._transport.send("POST", path, message.body, message.content_type)

    @staticmethod
    def _is_for(answer: Mapping[str, Any], seq: int) -> bool:
        """Return whether `answer` acknowledges message `seq`, and not an earlier one."""
        return answer.get("status") in ("stored", "duplicate") and answer.get("seq", seq) == seq

    def _acknowledge(self, message: Message, answer: Mapping[str, Any]) -> float:
        progress = self.cursor.progress
        stored, pause = answer.get("points"), answer.get("pause")
        self._suits_server = float(pause) if isinstance(pause, int | float) and pause >= 0 else None
        if message.kind is RecordKind.ROW and isinstance(stored, int) and stored != message.points:
            why = ValueError(f"the server stored {stored} of {message.points} points")
            self._guard.caught("storing", why)
        self._pass(message)
        if message.kind is RecordKind.FINISH:
            progress.finished = True
        # Grow again after a 413: the next rows may be smaller, or the server's limit may have changed.
        self._reader.row_limit = min(self._reader.row_limit * 2, self._settings.batch_rows)
        self._inbox.take(answer, progress)
        self._save()
        self.spool.forget(progress.position)
        self._on_success()
        return 0.0

    def _pass(self, message: Message) -> None:
        """Move the cursor past the message."""
        progress = self.cursor.progress
        progress.rows_sent += message.rows
        progress.points_sent += message.points
        progress.seq += 1
        progress.position = message.end
        progress.sealed_end, progress.sealed_digest = 0, ""

    def _save(self, *, durable: bool = False) -> None:
        """Save the cursor. Sending continues if that fails: only a later process would repeat messages."""
        with self._guard.shield("saving the send progress"):
            self.cursor.save(durable=durable)

    def _unseal(self) -> None:
        """Unseal the message, so that its records can be sent differently: the server did not store it."""
        self.cursor.progress.sealed_end, self.cursor.progress.sealed_digest = 0, ""

    def _set_aside(self, message: Message, outcome: SendOutcome) -> float:
        """Write a refused message to a file and continue with the next one.

        The next message reuses its seq, under which the server stored nothing.
        """
        progress = self.cursor.progress
        self._guard.refuse()
        self._guard.warn_once(
            f"refused {outcome.code}",
            "the server refused a message (%s: %s). It is kept in %s; training and sending continue.",
            outcome.code or outcome.status,
            outcome.message,
            self.spool.directory or "memory",
        )
        with self._guard.shield("setting a refused message aside"):
            if self.spool.directory is not None:
                write_refused(self.spool.directory, message, outcome)
        self._pass(message)
        progress.seq -= 1
        progress.messages_refused += 1
        if message.kind is RecordKind.FINISH:
            progress.finished = True
        self._save()
        self.spool.forget(progress.position)
        return 0.0

    # Handling failures

    def _put_off(self, outcome: SendOutcome) -> float:
        """React to a failed attempt. Returns the seconds to wait until the next one."""
        if outcome.action is NextAction.REGISTER and self._handshake.forget_run():
            return self._backoff.next()
        if outcome.action is NextAction.SEND_CATALOGUE and self._handshake.forget_writer():
            return self._backoff.next()
        if outcome.action is NextAction.NEW_WRITER:
            return self._become_new_writer()
        self._warn_of_trouble(outcome)
        self.is_unreachable = outcome.status == 0
        self.held = outcome.action in (NextAction.HOLD, NextAction.SET_ASIDE)
        if self.held:
            return max(self._settings.hold_seconds, outcome.wait or 0.0)
        if outcome.wait is not None:
            return max(outcome.wait, 0.01)
        return max(self._backoff.next(), 0.01)

    def _become_new_writer(self) -> float:
        """Continue under a new writer id, because another process has written under this one."""
        progress = self.cursor.progress
        progress.writer, progress.seq = str(uuid.uuid4()), 0
        self._unseal()
        self._handshake.forget_writer()
        self._save(durable=True)
        self._guard.warn_once("writer", "another process used this writer's id; continuing under a new one.")
        return self._backoff.next()

    def _warn_of_trouble(self, outcome: SendOutcome) -> None:
        self.trouble = (outcome.message or outcome.code).rstrip(".")
        key = f"trouble {outcome.status} {outcome.code}"
        self._guard.warn_once(
            key,
            "%s: %s. Training continues; unsent data is kept in %s.",
            self._transport.url,
            self.trouble,
            self.spool.directory or "memory",
        )

    def _on_success(self) -> None:
        """Reset the back-off and clear the last error."""
        self._backoff.reset()
        if self.trouble:
            logger.info("%s responds again.", self._transport.url)
        self.trouble, self.held, self.is_unreachable = "", False, False
        self._heartbeat_at = time.monotonic() + self._settings.heartbeat_seconds

    def _idle(self) -> float:
        """With nothing to send: complete the handshake, and send a heartbeat if one is due."""
        # Register a run before its first step, so that the dashboard shows it; but not at once, because
        # precision and recipe cannot be changed later and `watch` needs a moment to detect them.
        is_early = not self.hurry and time.monotonic() < self._introduce_at
        if is_early and not self._handshake.is_complete:
            return self._settings.interval
        if (pause := self._introduce()) is not None:
            return pause
        if not self._live:
            return self._settings.interval
        overdue = time.monotonic() >= self._heartbeat_at
        due = overdue or self.listening or self._guard.counts()[1] != self._errors_reported
        if self._handshake.has_registered and due and not self.cursor.progress.finished:
            return self._heartbeat()
        return self._idle_pause()

    def _idle_pause(self) -> float:
        """The seconds until there may be something to send, or a heartbeat is due."""
        until_heartbeat = self._heartbeat_at - time.monotonic()
        return (
            min(self._settings.interval, until_heartbeat) if until_heartbeat > 0 else self._settings.interval
        )

    def _heartbeat(self) -> float:
        progress, (dropped, errors) = self.cursor.progress, self._guard.counts()
        document = {
            "writer": progress.writer,
            "dropped": dropped,
            "errors": errors,
            "pending": int(self.spool.read(progress.position) is not None),
        }
        path = f"/runs/{self.run}/heartbeat{self._inbox.query(progress)}"
        outcome = self._transport.send("POST", path, dump_json(document))
        self._heartbeat_at = time.monotonic() + self._settings.heartbeat_seconds
        # A failed heartbeat is not retried: the next one reports the same counts.
        self._errors_reported = errors
        if outcome.action is not NextAction.DONE:
            return min(self._put_off(outcome), self._settings.heartbeat_seconds)
        self._inbox.take(outcome.answer, progress)
        self._on_success()
        return self._idle_pause()
