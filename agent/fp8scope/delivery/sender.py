"""Reads the spool and gets every message to the server exactly once.

One message is under way at a time. Before it is sent it is *sealed*: the cursor remembers which records it
consists of, so that a repetition, even by another process after a crash, is the same message.
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
from fp8scope.delivery.transport import Action, Backoff, Outcome, Transport
from fp8scope.guard import Guard
from fp8scope.recording.records import Record, RecordKind, dump_json
from fp8scope.recording.spool import Spool

logger = logging.getLogger("fp8scope")


class Sender:
    """Call `advance` again and again; it returns the seconds to wait before the next call (0: go on)."""

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
        """Why nothing gets through at the moment; empty when it does."""
        self.held = False
        """The last attempt met something that only a person can repair."""
        self._settings = settings
        self._guard = guard
        self.hurry = not live
        """Send what there is at once instead of waiting for more to go along."""
        # Commands are for a training that goes on.
        self._inbox = Inbox(guard, on_alerts, on_commands if live else None)
        self.listening = False
        """Ask for commands often: somebody waits for one."""
        self._live = live
        self._on_page = on_page
        self._transport = Transport(settings)
        self._reader = Reader(run, spool, settings)
        self._handshake = Handshake(run, self._transport, self._reader)
        self._backoff = Backoff(settings.backoff_base, settings.backoff_cap)
        self._heartbeat_at = time.monotonic() + settings.heartbeat_seconds
        self._batch_at = 0.0
        self._introduce_at = time.monotonic() + settings.introduce_seconds
        self._errors_told = 0
        for record in spool.preamble_before(cursor.progress.position):
            self._reader.learn(record)

    def advance(self) -> float:
        """Do the next thing that is due."""
        record = self._next_record()
        if record is None:
            return self._idle()
        if record.kind in (RecordKind.REGISTRATION, RecordKind.TENSORS):
            self._reader.learn(record)
            self.cursor.progress.position = record.end
            return 0.0
        if (pause := self._introduce()) is not None:
            return pause
        if (pause := self._until_batch(record)) > 0:
            return pause
        self._batch_at = time.monotonic() + self._settings.interval
        return self._deliver(self._reader.build(record, self.cursor.progress))

    @property
    def page(self) -> str:
        """The address of the run's page, once registered."""
        return self._handshake.page

    @property
    def margin(self) -> float | None:
        """The project's margin, once registered."""
        return self._handshake.margin

    def is_done(self) -> bool:
        """Whether everything in the spool has been answered and the run is known to the server."""
        return self._next_record() is None and self._handshake.run_is_known

    def close(self) -> None:
        """Let go of the connections."""
        self._transport.close()

    # What is to be sent

    def _next_record(self) -> Record | None:
        return self.spool.read(self.cursor.progress.position)

    def _until_batch(self, first: Record) -> float:
        """Seconds to wait for more rows before the next batch is worth a request."""
        waiting = self.spool.end - first.begin
        if self.hurry or self.cursor.progress.sealed_end or waiting >= self._settings.batch_bytes // 8:
            return 0.0
        return self._batch_at - time.monotonic()

    # Sending it

    def _introduce(self) -> float | None:
        """Say who is writing where the server does not know it yet; None when it does."""
        if self._handshake.is_complete:
            return None
        outcome = self._handshake.tell(self.cursor.progress)
        if outcome.action is not Action.DONE:
            return self._put_off(outcome)
        self._on_page(self.page)
        self._through()
        return 0.0

    def _deliver(self, message: Message) -> float:
        progress = self.cursor.progress
        rebuilt_otherwise = progress.sealed_end != 0 and progress.sealed_digest != message.digest
        if progress.sealed_end == 0:
            progress.sealed_end, progress.sealed_digest = message.end, message.digest
            self._save(durable=True)
        path = f"/runs/{self.run}/{message.path}{self._inbox.query(progress)}"
        outcome = self._transport.send("POST", path, message.body, message.content_type)
        if outcome.action is Action.DONE and self._is_for(outcome.answer, progress.seq):
            return self._acknowledge(message, outcome.answer)
        if outcome.action is Action.NEW_WRITER and rebuilt_otherwise:
            # Another version of Arrow packs the same rows into other bytes. The server has the message as an
            # earlier process sent it.
            return self._acknowledge(message, {})
        if outcome.action is Action.HALVE and message.records > 1:
            self._unseal()
            self._reader.row_limit = max(1, message.records // 2)
            return 0.0
        if outcome.action in (Action.SET_ASIDE, Action.HALVE):
            return self._set_aside(message, outcome)
        if outcome.action is Action.DONE:
            outcome = Outcome(Action.RETRY, message="the answer belongs to another message")
        return self._put_off(outcome)

    @staticmethod
    def _is_for(answer: Mapping[str, Any], seq: int) -> bool:
        """Whether this acknowledges our message: a repeated answer to the one before must not."""
        return answer.get("status") in ("stored", "duplicate") and answer.get("seq", seq) == seq

    def _acknowledge(self, message: Message, answer: Mapping[str, Any]) -> float:
        progress = self.cursor.progress
        stored = answer.get("points")
        if message.kind is RecordKind.ROW and isinstance(stored, int) and stored != message.points:
            self._guard.error("storing", f"the server stored {stored} of {message.points} points")
        self._pass(message)
        if message.kind is RecordKind.FINISH:
            progress.finished = True
        # Grow again after a 413: the next rows may be smaller, and the server's bound another.
        self._reader.row_limit = min(self._reader.row_limit * 2, self._settings.batch_rows)
        self._inbox.take(answer, progress)
        self._save()
        self.spool.forget(progress.position)
        self._through()
        return 0.0

    def _pass(self, message: Message) -> None:
        """Move the cursor behind the message."""
        progress = self.cursor.progress
        progress.rows_sent += message.rows
        progress.points_sent += message.points
        progress.seq += 1
        progress.position = message.end
        progress.sealed_end, progress.sealed_digest = 0, ""

    def _save(self, *, durable: bool = False) -> None:
        """Remember how far we are. Where the disk refuses that, sending goes on: only a process that comes
        after this one would send something twice.
        """
        with self._guard.shield("remembering what was sent"):
            self.cursor.save(durable=durable)

    def _unseal(self) -> None:
        """The server has refused the message for good: its records may become another one."""
        self.cursor.progress.sealed_end, self.cursor.progress.sealed_digest = 0, ""

    def _set_aside(self, message: Message, outcome: Outcome) -> float:
        """Keep a refused message as a file of its own and go on with the next.

        Its seq is free again: the server stored nothing under it.
        """
        progress = self.cursor.progress
        self._guard.refuse()
        self._guard.warn_once(
            f"refused {outcome.code}",
            "the server refused a message (%s: %s). It is kept in %s; training and sending go on.",
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

    # When it does not work

    def _put_off(self, outcome: Outcome) -> float:
        """Seconds until the next attempt, after doing what the answer asks for."""
        if outcome.action is Action.REGISTER and self._handshake.forget_run():
            return self._backoff.next()
        if outcome.action is Action.SEND_CATALOGUE and self._handshake.forget_writer():
            return self._backoff.next()
        if outcome.action is Action.NEW_WRITER:
            return self._become_new_writer()
        self._tell_trouble(outcome)
        self.held = outcome.action in (Action.HOLD, Action.SET_ASIDE)
        if self.held:
            return max(self._settings.hold_seconds, outcome.wait or 0.0)
        if outcome.wait is not None:
            return max(outcome.wait, 0.01)
        return max(self._backoff.next(), 0.01)

    def _become_new_writer(self) -> float:
        """Another process writes under this id. What it stored is its own; ours goes under a new one."""
        progress = self.cursor.progress
        progress.writer, progress.seq = str(uuid.uuid4()), 0
        self._unseal()
        self._handshake.forget_writer()
        self._save(durable=True)
        self._guard.warn_once("writer", "another process used this writer's id; going on under a new one.")
        return self._backoff.next()

    def _tell_trouble(self, outcome: Outcome) -> None:
        self.trouble = (outcome.message or outcome.code).rstrip(".")
        place = self.spool.directory or "memory"
        key = f"trouble {outcome.status} {outcome.code}"
        self._guard.warn_once(
            key,
            "%s: %s. Training goes on; what is seen is kept in %s.",
            self._transport.url,
            self.trouble,
            place,
        )

    def _through(self) -> None:
        """Something was answered well."""
        self._backoff.reset()
        if self.trouble:
            logger.info("%s answers again.", self._transport.url)
        self.trouble, self.held = "", False
        self._heartbeat_at = time.monotonic() + self._settings.heartbeat_seconds

    def _idle(self) -> float:
        """Nothing to send: say that the run is alive, now and then."""
        # A new run shows up on the dashboard before its first step; but what is registered first stays, so
        # `watch` gets a moment to find out precision and recipe.
        if not self.hurry and time.monotonic() < self._introduce_at:
            return self._settings.interval
        if (pause := self._introduce()) is not None:
            return pause
        if not self._live:
            return self._settings.interval
        overdue = time.monotonic() >= self._heartbeat_at
        due = overdue or self.listening or self._guard.counts()[1] != self._errors_told
        if self._handshake.run_is_known and due and not self.cursor.progress.finished:
            return self._heartbeat()
        return self._settings.interval

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
        # A heartbeat that does not arrive is not repeated: the next one says the same, later.
        self._errors_told = errors
        if outcome.action is not Action.DONE:
            return min(self._put_off(outcome), self._settings.heartbeat_seconds)
        self._inbox.take(outcome.answer, progress)
        self._through()
        return self._settings.interval
