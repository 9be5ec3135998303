"""From the queue to the spool: by a thread of its own, and by the training thread when that lags behind.

The promise: when a step ends, the row of the step before it has been written (`write(2)`), so that `kill -9`
loses at most the last completed step. Steps that are longer than a switch of threads get it from the
recorder's thread. For shorter ones the training thread writes what is left itself, as long as the disk is
quick, and else waits for the recorder. That waiting is bounded: see WAIT_AT_MOST and the two after it. A disk
that is slower than these bounds puts at risk what is in the queue, and nothing else can: not a network, nor a
server. What is not bounded is a disk that was quick and hangs from one write to the next, where it was the
training thread's turn: that one step ends when the disk answers.

A step whose values are still being computed by a device is not completed in this sense.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fp8scope.config import Settings
from fp8scope.guard import Guard
from fp8scope.recording.entries import Catalogue, Entry, Origin
from fp8scope.recording.records import RecordKind, dump_json
from fp8scope.recording.reserve import Counts
from fp8scope.recording.spool import Spool, SpoolFullError

WAIT_AT_MOST = 0.25
"""Seconds that the end of one step may wait for the disk."""
WAIT_ALLOWANCE = 1.0
WAIT_SHARE = 0.01
"""All steps together may wait WAIT_ALLOWANCE seconds and this share of the run's time."""
UNNOTICED = 0.005
"""A wait that is shorter, the interpreter's switch between threads, is not counted; a write, quick."""
POLL_SECONDS = 0.0005


class Recorder:
    """The queue of one writer. `spool` is set before the first `drain`."""

    def __init__(self, settings: Settings, guard: Guard, origin: Origin) -> None:
        self.spool: Spool | None = None
        self.lock = threading.Lock()
        """Held by whoever takes from the queue and appends to the spool."""
        self._settings = settings
        self._guard = guard
        self._origin = origin
        self.waiting: deque[Entry | Catalogue] = deque()
        self.handed = 0
        """Entries that were handed over; what adds one to `waiting` counts it."""
        self.recorded = 0
        """Those of them that were written, or given up."""
        self._began = time.monotonic()
        self._waited = 0.0
        self._quick = False
        """Whether the last write was: a disk that hangs must hold up the recorder, not the training."""
        self._registration = b""
        self._tensors: list[Mapping[str, Any]] = []
        self._statistics: Sequence[str] = ()
        self._tensors_recorded = -1
        self._rows = 0
        """Rows that the spool has taken, on the disk or in memory."""

    def add(self, entry: Entry | Catalogue) -> None:
        """Queue something; waits for nothing."""
        self.waiting.append(entry)
        self.handed += 1

    def is_full(self, row_bytes: int) -> bool:
        """Whether the queue has reached its bound, were its entries rows of this size."""
        waiting = len(self.waiting)
        return waiting >= self._settings.queue_rows or waiting * row_bytes > self._settings.memory_bytes

    def catch_up(self, but: int = 1) -> None:
        """On the training thread: see to it that all entries `but` so many of the newest are recorded."""
        if self.handed - self.recorded <= but:
            return
        began = time.monotonic()
        allowance = WAIT_ALLOWANCE + WAIT_SHARE * (began - self._began) - self._waited
        wait = min(allowance, WAIT_AT_MOST)
        if wait > 0 and not self._quick:
            while self._is_behind(but) and time.monotonic() < began + wait:
                time.sleep(POLL_SECONDS)
        elif wait > 0:
            # Not `acquire(timeout=...)`: Ctrl-C between it and the `try` would leave the lock taken for ever.
            while (held := self.lock.locked()) and time.monotonic() < began + wait:
                time.sleep(POLL_SECONDS / 10)
            if not held:
                with self.lock, self._guard.shield("recording"):
                    self._drain(self.handed - but)
        self._waited += max(0.0, time.monotonic() - began - UNNOTICED)

    def drain(self) -> bool:
        """On the recorder's thread: record what was handed over by now, waiting for the device where that is
        needed. Whether there was anything.

        What comes meanwhile is for the next time: where steps are so short that the training thread writes
        them, the two would be in each other's way.
        """
        before, until = self.recorded, self.handed
        while self.recorded < until and (first := self._first()) is not None:
            # Not under the lock: the training thread may ask for it, and must not wait for its own device.
            first.wait()
            with self.lock:
                self._drain(until)
        return self.recorded != before

    def _is_behind(self, but: int) -> bool:
        """Whether there is something to write; not what a device still works on."""
        first = self._first()
        return self.handed - self.recorded > but and (first is None or first.is_ready())

    def _first(self) -> Entry | Catalogue | None:
        try:
            return self.waiting[0]
        except IndexError:
            return None

    def _drain(self, until: int) -> None:
        """Record the first `until` entries of all, or those before the first that a device still works on."""
        while self.recorded < until and self.waiting and self.waiting[0].is_ready():
            entry = self.waiting.popleft()
            end = self.spool.end if self.spool is not None else 0
            try:
                if isinstance(entry, Catalogue):
                    self._tensors[entry.offset :] = entry.tensors
                    self._statistics = entry.statistics
                else:
                    began = time.monotonic()
                    try:
                        self._record(entry)
                    except Exception as error:
                        self._guard.caught(f"recording ({entry.kind.name.lower()})", error)
                    self._quick = time.monotonic() - began < UNNOTICED
                    entry.done()
            except BaseException:
                # Ctrl-C, in the middle of our own work: nothing that was handed over may be lost by it.
                if self.spool is not None and self.spool.end == end:
                    self.waiting.appendleft(entry)
                    self.recorded -= 1
                raise
            finally:
                self.recorded += 1

    def _record(self, entry: Entry) -> None:
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
        except Exception as error:
            if entry.kind is RecordKind.ROW:
                self._guard.drop(1, str(error))
                self._note_counts()
            if entry.kind is not RecordKind.ROW or not isinstance(error, SpoolFullError):
                raise

    def _note_counts(self) -> None:
        """What a `kill -9` would lose now is counted by `fp8scope sync`."""
        if self.spool is not None:
            self.spool.note(Counts(self._rows, self._guard.counts()[0]))

    def _record_catalogue(self) -> None:
        """The tensors that the spool does not have yet; without any, only who this writer is."""
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
        """What each segment of the spool begins with, so that it can be read without those before it."""
        head = [(RecordKind.REGISTRATION, self._registration)] if self._registration else []
        if self._tensors_recorded >= 0:
            head.append((RecordKind.TENSORS, self._catalogue(0, self._tensors_recorded)))
        return head
