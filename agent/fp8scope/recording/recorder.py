"""Moves entries from the queue to the spool, on the recorder thread or, if that lags, on the training thread.

Guarantee: when a step ends, the row of the previous step has been written (`write(2)`), so `kill -9` loses at
most the last completed step. A step whose values are still being computed on a device does not count as
completed.

If steps are longer than a thread switch, the recorder thread does all writes. If they are shorter, the
training thread writes the rest itself while the disk is fast, and waits for the recorder while it is slow.
That wait is bounded by WAIT_AT_MOST, WAIT_ALLOWANCE and WAIT_SHARE. With a disk slower than these bounds,
queued rows can be lost in a crash; networks and servers have no such effect. One case is unbounded: if a fast
disk hangs in a write on the training thread, that step ends only when the disk responds.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.recording.entries import Catalogue, Origin, SpoolEntry
from fp8scope.recording.light_rows import LightRow
from fp8scope.recording.records import RecordKind, dump_json
from fp8scope.recording.reserve import RowCounts
from fp8scope.recording.spool import Spool, SpoolFullError

WAIT_AT_MOST = 0.25
"""Longest time in seconds that the end of one step waits for the disk."""
WAIT_ALLOWANCE = 1.0
WAIT_SHARE = 0.01
"""All steps together wait at most WAIT_ALLOWANCE seconds plus this share of the run's duration."""
UNNOTICED = 0.005
"""Shorter waits are not counted (the interpreter's thread switch interval); shorter writes are fast."""
POLL_SECONDS = 0.0005


class Recorder:
    """The queue of one writer, and the writes from it to the spool. Set `spool` before the first `drain`."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        origin: Origin,
        on_urgent: Callable[[int], None] = lambda end: None,
    ) -> None:
        """`on_urgent` is called when a record that should be sent at once is written, with its end."""
        self.spool: Spool | None = None
        self.lock = threading.Lock()
        """Held while taking entries from the queue and appending them to the spool."""
        self._settings = settings
        self._guard = guard
        self._origin = origin
        self._on_urgent = on_urgent
        self.waiting: deque[SpoolEntry | Catalogue] = deque()
        """Entries that were put and are not yet written or dropped, those that are being written included."""
        self._recorded = 0
        """Number of entries ever written or dropped. Changes only while `lock` is held."""
        self._began = time.monotonic()
        self._waited = 0.0
        self._quick = False
        """Whether the last write was fast. A slow disk must block the recorder, not the training."""
        self._registration = b""
        self._tensors: list[Mapping[str, Any]] = []
        self._statistics: Sequence[str] = ()
        self._tensors_recorded = -1
        self._rows = 0
        """Rows that the spool has accepted, on disk or in memory."""

    def add(self, entry: SpoolEntry | Catalogue) -> None:
        """Queue an entry without waiting."""
        self.waiting.append(entry)

    def is_full(self, row_bytes: int) -> bool:
        """Return whether the queue is full, assuming entries of `row_bytes` bytes."""
        waiting = len(self.waiting)
        return waiting >= self._settings.queue_rows or waiting * row_bytes > self._settings.memory_bytes

    def catch_up(self, but: int = 1) -> None:
        """On the training thread: have all entries recorded except the `but` newest, within the bounds."""
        if len(self.waiting) <= but:
            return
        began = time.monotonic()
        allowance = WAIT_ALLOWANCE + WAIT_SHARE * (began - self._began) - self._waited
        wait = min(allowance, WAIT_AT_MOST)
        if wait > 0 and not self._quick:
            while self._is_behind(but) and time.monotonic() < began + wait:
                time.sleep(POLL_SECONDS)
        elif wait > 0:
            # Not `acquire(timeout=...)`: Ctrl-C between it and the `try` would leave the lock held forever.
            while (held := self.lock.locked()) and time.monotonic() < began + wait:
                time.sleep(POLL_SECONDS / 10)
            if not held:
                with self.lock, self._guard.shield("recording"):
                    self._drain(self._recorded + len(self.waiting) - but)
        self._waited += max(0.0, time.monotonic() - began - UNNOTICED)

    def drain(self) -> bool:
        """Record all entries queued by now, waiting for the device, and for what another thread is writing.

        Returns whether there were any. For the recorder's thread, and others that may wait for the device.
        Entries that arrive meanwhile are left for the next call: if steps are so short that the training
        thread writes them, the two threads would contend for the lock.
        """
        # A sum that is right whatever an exception interrupts: Ctrl-C may come between any two operations.
        with self.lock:
            before = self._recorded
            until = before + len(self.waiting)
        while self._recorded < until:
            first = self._first()
            if first is not None:
                # Without the lock: the training thread may need it, and must not wait for its own device.
                first.wait()
            with self.lock:
                self._drain(until)
            if first is None:
                # The other thread had taken the rest.
                break
        return self._recorded != before

    def add_now(self, entry: SpoolEntry) -> None:
        """On the recorder thread: record an entry that never was in the queue."""
        with self.lock, self._guard.shield(f"recording ({entry.kind.name.lower()})"):
            self._record(entry)

    def waits_for_device(self) -> bool:
        """Return whether the values of the next entry are still on a device."""
        first = self._first()
        return first is not None and not first.is_ready()

    def _is_behind(self, but: int) -> bool:
        """Return whether an entry is ready to be written; entries that wait for a device do not count."""
        first = self._first()
        return len(self.waiting) > but and (first is None or first.is_ready())

    def _first(self) -> SpoolEntry | Catalogue | None:
        try:
            return self.waiting[0]
        except IndexError:
            return None

    def _drain(self, until: int) -> None:
        """Record entries until `until` of all are, or up to the first that waits for a device."""
        while self._recorded < until and self.waiting and self.waiting[0].is_ready():
            entries = self._next_entries()
            before = self.spool.written if self.spool is not None else 0
            written = True
            try:
                self._record_entries(entries)
            except BaseException:
                # Ctrl-C: what is not written yet stays in the queue.
                written = self.spool is None or self.spool.written != before
                raise
            finally:
                if written:
                    for _ in entries:
                        self.waiting.popleft()
                    self._recorded += len(entries)

    def _next_entries(self) -> "list[Any]":
        """Return the first entry of the queue, or all rows of light steps that are before any other."""
        if type(self.waiting[0]) is not LightRow:
            return [self.waiting[0]]
        # The training thread may append meanwhile, so the queue has no iterator.
        entries: list[Any] = []
        for index in range(len(self.waiting)):
            entry = self.waiting[index]
            if type(entry) is not LightRow:
                break
            entries.append(entry)
        return entries

    def _record_entries(self, entries: "list[Any]") -> None:
        entry = entries[0]
        if isinstance(entry, Catalogue):
            self._tensors[entry.offset :] = entry.tensors
            self._statistics = entry.statistics
            return
        began = time.monotonic()
        try:
            self._record(entry) if len(entries) == 1 else self._record_together(entries)
        except Exception as error:
            self._guard.caught(f"recording ({entry.kind.name.lower()})", error)
        self._quick = time.monotonic() - began < UNNOTICED
        entry.done()

    def _record_together(self, rows: Sequence[LightRow]) -> None:
        """Record rows of light steps by one write."""
        assert self.spool is not None
        if self._tensors_recorded < len(self._tensors):
            self._record_catalogue()
        payloads = [row.payload() for row in rows]
        written = self.spool.append_rows(payloads)
        self._rows += written
        if written < len(rows):
            self._guard.drop(len(rows) - written, "the spool is full")
        if written < len(rows) or self.spool.trouble is not None:
            self._note_counts()
        if any(row.is_urgent for row in rows):
            self._on_urgent(self.spool.end)

    def _record(self, entry: SpoolEntry) -> None:
        assert self.spool is not None
        try:
            pieces = entry.pieces()
            if not pieces:
                return
            if entry.kind is RecordKind.REGISTRATION:
                self._registration = b"".join(pieces)
                self.spool.append(entry.kind, *pieces)
            if self._tensors_recorded < len(self._tensors):
                self._record_catalogue()
            if entry.kind is not RecordKind.REGISTRATION:
                self.spool.append(entry.kind, *pieces)
                self._rows += entry.kind is RecordKind.ROW
                if self.spool.trouble is not None:
                    self._note_counts()
                if entry.is_urgent:
                    self._on_urgent(self.spool.end)
        except Exception as error:
            if entry.kind is RecordKind.ROW:
                self._guard.drop(1, str(error))
                self._note_counts()
            if entry.kind is not RecordKind.ROW or not isinstance(error, SpoolFullError):
                raise

    def _note_counts(self) -> None:
        """Store the counts from which `fp8scope sync` computes the rows lost to a `kill -9`."""
        if self.spool is not None:
            self.spool.note(RowCounts(self._rows, self._guard.counts()[0]))

    def _record_catalogue(self) -> None:
        """Append the tensors that the spool does not have yet, and the writer's origin."""
        assert self.spool is not None
        self.spool.append(
            RecordKind.TENSORS, self._catalogue(max(0, self._tensors_recorded), len(self._tensors))
        )
        self._tensors_recorded = len(self._tensors)

    def _catalogue(self, begin: int, end: int) -> bytes:
        tensors, statistics = self._tensors[begin:end], list(self._statistics)
        document = {"offset": begin, "tensors": tensors, "statistics": statistics}
        return dump_json({**self._origin.to_dict(), **document})

    def preamble(self) -> list[tuple[RecordKind, bytes]]:
        """Return the first records of each segment, which make it readable without the earlier ones."""
        head = [(RecordKind.REGISTRATION, self._registration)] if self._registration else []
        if self._tensors_recorded >= 0:
            head.append((RecordKind.TENSORS, self._catalogue(0, self._tensors_recorded)))
        return head
