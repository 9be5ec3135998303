"""The spool: an append-only log of records on disk, which decouples training from the network.

A spool is the folder of one writer. Its segments are files named by the position of their first byte. Each
begins with the run's registration and the tensor catalogue, so that acknowledged segments can be deleted.

If a file cannot be written, the log continues in memory, within a bound. As soon as the disk accepts writes
again, these segments are moved there; memory therefore always holds the end of the log. The record of how the
run ended fits even on a full disk: see `fp8scope.recording.reserve`.

One thread appends; another reads and forgets. Positions count bytes since the beginning of the spool.
"""

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fp8scope.recording.records import (
    FRAME,
    MAX_PAYLOAD,
    Bytes,
    Record,
    RecordKind,
    TornRecordError,
    check_frame,
    frame,
    size_of,
)
from fp8scope.recording.reserve import RESERVE_BYTES as LAST_BYTES
from fp8scope.recording.reserve import Reserve, RowCounts
from fp8scope.recording.segments import FileSegment, Lock, LogSegment, MemorySegment, Owner, sync_directory

MAGIC = b"FP8SPL\x00\x01"
SEGMENT_BYTES = 16 << 20
MEMORY_SEGMENT_BYTES = 1 << 20
RESERVE_BYTES = 16 << 20
"""Extra memory for records other than rows: they still fit when rows are being dropped."""
RETRY_SECONDS = 1.0
"""Interval at which the disk is tried again while the log continues in memory."""

Preamble = Callable[[], Sequence[tuple[RecordKind, bytes]]]
OnDisk = Callable[[OSError | None], None]
"""Called with the error when the log continues in memory, and with None when all of it is on disk again."""


def find_spools(directory: Path) -> Iterator[Path]:
    """Yield every spool at or below `directory`; other processes may remove theirs meanwhile."""
    for folder, names, files in os.walk(directory):
        names.sort()
        if "cursor" in files:
            yield Path(folder)


class SpoolFullError(OSError):
    """The record fits neither on the disk nor in the memory reserved for it."""


class Spool:
    """The log of one writer. With `directory` None, all of it is in memory.

    `owner` is the process that will write to it; None opens an existing spool for sending. With `durable`,
    `append` returns only when the record is on the disk, not merely in the kernel.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        max_bytes: int = 4 << 30,
        memory_bytes: int = 32 << 20,
        preamble: Preamble = lambda: (),
        owner: Owner | None = None,
        durable: bool = False,
        on_disk: OnDisk = lambda error: None,
    ) -> None:
        self.directory = directory
        self.trouble: OSError | None = None
        """The error of the last failed write; None while writes succeed."""
        self._on_disk = on_disk
        self._retry_at = 0.0
        self._answered = 0
        self._torn: dict[int, int] = {}
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._memory_segment_bytes = min(MEMORY_SEGMENT_BYTES, memory_bytes // 4)
        self._segment_bytes = max(min(SEGMENT_BYTES, max_bytes // 8), 64 << 10)
        self._preamble = preamble
        self._mutex = threading.Lock()
        self._segments: list[LogSegment] = []
        self._lock = Lock(directory, owner) if directory is not None else None
        self._reserve: Reserve | None = None
        if directory is not None and owner is not None:
            try:
                self._reserve = Reserve(directory)
            except OSError:
                self.close()
                raise
        self._durable = durable
        self._active: LogSegment | None = None
        self._end = 0
        for path in sorted(directory.glob("*.log")) if directory is not None else ():
            if path.stem.isdecimal():
                self._segments.append(FileSegment(path, int(path.stem), create=False))
        for segment, following in itertools.pairwise(self._segments):
            # A failed write may have left bytes past the segment's end that could not be truncated.
            segment.length = min(segment.length, following.base - segment.base)
        if self._segments:
            self._end = self._segments[-1].end

    @property
    def end(self) -> int:
        """The position after the last complete record."""
        return self._end

    @property
    def written(self) -> int:
        """The position after everything that was written. Ctrl-C may come before `end` is moved there."""
        return self._end if self._active is None else self._active.end

    @property
    def begin(self) -> int:
        """The position of the oldest byte still held."""
        with self._mutex:
            return self._segments[0].base if self._segments else self._end

    @property
    def torn(self) -> int:
        """Number of bytes that reading skipped because they are not complete records."""
        return sum(self._torn.values())

    def has_room(self) -> bool:
        """Return whether there is room for records that matter less than rows."""
        is_on_disk = self.directory is not None and self.trouble is None
        return is_on_disk and self._end - self.begin < self._max_bytes // 2

    def in_memory(self) -> bool:
        """Return whether part of the log is in memory, and would be lost with the process."""
        with self._mutex:
            return any(isinstance(segment, MemorySegment) for segment in self._segments)

    def append(self, kind: RecordKind, *payload: Bytes) -> None:
        """Append a record. Once this returns, it survives the death of the process (unless `in_memory`).

        The payload may be given in pieces. Raises SpoolFullError if the bounds are reached.
        """
        size = size_of(payload)
        if size > MAX_PAYLOAD:
            raise SpoolFullError(f"a record of {size} bytes is too large")
        size += FRAME.size
        if kind is RecordKind.ROW and self._end - self.begin + size > self._max_bytes:
            raise SpoolFullError(f"the spool has reached its limit of {self._max_bytes >> 20} MiB")
        if self.trouble is not None and time.monotonic() >= self._retry_at:
            self.save()
        if self._active is None or self._active.length >= self._size_of(self._active):
            self._roll(kind, size)
        assert self._active is not None
        header = frame(kind, *payload)
        try:
            self._active.append(header, *payload)
        except OSError:
            self._append_elsewhere(kind, size, header, *payload)
        self._end = self._active.end

    def append_rows(self, payloads: Sequence[bytes]) -> int:
        """Append ROW records, by one write if they fit. Returns how many were accepted, from the first on."""
        data = b"".join([frame(RecordKind.ROW, payload) + payload for payload in payloads])
        active = self._active
        has_room = self._end - self.begin + len(data) <= self._max_bytes
        if has_room and active is not None and self.trouble is None and active.length < self._size_of(active):
            with contextlib.suppress(OSError):
                active.append(data)
                self._end = active.end
                return len(payloads)
        for index, payload in enumerate(payloads):
            try:
                self.append(RecordKind.ROW, payload)
            except SpoolFullError:
                return index
        return len(payloads)

    def _append_elsewhere(self, kind: RecordKind, size: int, *pieces: Bytes) -> None:
        """Append to a new file, or to memory if that fails too, after a write to the active file failed."""
        end = self._end
        self._roll(kind, size)
        assert self._active is not None
        try:
            self._active.append(*pieces)
        except OSError as error:
            self._refused(error)
            with self._mutex:
                useless = self._segments.pop()
            with contextlib.suppress(OSError):
                useless.delete()
            self._end = end
            self._roll(kind, size)
            self._active.append(*pieces)

    def _size_of(self, segment: LogSegment) -> int:
        return self._memory_segment_bytes if isinstance(segment, MemorySegment) else self._segment_bytes

    def _roll(self, kind: RecordKind, size: int) -> None:
        """Begin a new segment, in a file if possible, otherwise in memory."""
        head = self._head()
        segment: LogSegment | None = None
        if self.directory is not None and self.trouble is None:
            segment = self._new_file(self._end, head)
        if segment is None:
            with self._mutex:
                held = sum(s.length for s in self._segments if isinstance(s, MemorySegment))
            bound = self._memory_bytes + (0 if kind is RecordKind.ROW else RESERVE_BYTES)
            if held + len(head) + max(size, self._memory_segment_bytes) > bound:
                why = self.trouble.strerror if self.trouble is not None else "there is no disk"
                memory = f"{self._memory_bytes >> 20} MiB of memory are full"
                raise SpoolFullError(f"the disk cannot be written ({why}), and {memory}")
            segment = MemorySegment(self._end)
            segment.append(head)
        with self._mutex:
            self._segments.append(segment)
        self._active = segment
        self._end = segment.end

    def _head(self) -> bytes:
        return MAGIC + b"".join(frame(kind, payload) + payload for kind, payload in self._preamble())

    def _new_file(self, base: int, data: bytes) -> FileSegment | None:
        """Create a file segment at `base` that begins with `data`; None if the disk refuses it."""
        assert self.directory is not None
        path = self.directory / f"{base:020d}.log"
        try:
            segment = FileSegment(path, base, create=True, durable=self._durable)
        except OSError as error:
            self._refused(error)
            return None
        try:
            segment.append(data)
        except OSError as error:
            self._refused(error)
            with contextlib.suppress(OSError):
                segment.delete()
            return None
        if self._durable:
            sync_directory(self.directory)
        return segment

    # Memory segments, used while the disk cannot be written

    def _refused(self, error: OSError) -> None:
        """Store the error of a failed write, and report the first one: the log continues in memory."""
        earlier, self.trouble = self.trouble, error
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if earlier is None:
            self._on_disk(error)

    def note(self, counts: RowCounts) -> None:
        """Store counts on disk, so that rows in memory are counted if the process is killed."""
        if self._reserve is not None and self.trouble is not None:
            self._reserve.note(counts)

    def save(self) -> bool:
        """Move whole segments from memory to the disk, oldest first. Returns whether none is left in memory.

        Call this only on the appending thread.
        """
        self._retry_at = time.monotonic() + RETRY_SECONDS
        memory = self._in_memory()
        for segment in memory:
            if self.directory is None or not self._has_room(segment.length):
                return False
            file = self._new_file(segment.base, segment.read(segment.base, segment.length))
            if file is None:
                return False
            self._replace(segment, file)
        if self.trouble is not None:
            self.trouble = None
            if self._reserve is not None:
                self._reserve.note(None)
            if memory:
                self._on_disk(None)
        return True

    def rescue(self) -> list[Record]:
        """Move as much as possible from memory to the disk, after the last `append`.

        Returns the records that are lost, in order: the end of the log, without records already answered.
        """
        if not self._in_memory() or self.save():
            return []
        lost: list[Record] = []
        for segment in self._in_memory():
            lost += self._records_from(segment, self._answered) if lost else self._rescue_some(segment)
        with self._mutex:
            self._segments = [s for s in self._segments if not isinstance(s, MemorySegment)]
        self._active = None
        return lost

    def _rescue_some(self, segment: MemorySegment) -> list[Record]:
        """Write as many records of a segment as fit on the disk, at their positions; returns the others."""
        records, head = self._records_from(segment, self._answered), self._head()
        if not records or self.directory is None:
            return records
        base = records[0].begin - len(head)
        if base < segment.base:
            # The preamble does not fit before these records: write the whole segment, which has its own.
            base, head, records = segment.base, MAGIC, self._records_from(segment, 0)
        file = self._new_file(base, head)
        if file is None:
            return [record for record in records if record.begin >= self._answered]
        saved = 0
        with contextlib.suppress(OSError):
            for record in records:
                file.append(frame(record.kind, record.payload), record.payload)
                saved += 1
        if saved:
            self._replace(segment, file)
        else:
            with contextlib.suppress(OSError):
                file.delete()
        return [record for record in records[saved:] if record.begin >= self._answered]

    def end_with(self, kind: RecordKind, payload: bytes) -> None:
        """After `rescue`, write a last record to the reserved disk space. Raises OSError if that fails.

        The segment begins with the preamble if it fits; otherwise a reader needs the earlier segments.
        """
        if self.directory is None or self._reserve is None:
            raise SpoolFullError("no disk space is reserved")
        record = frame(kind, payload) + payload
        head = self._head()
        data = (head if len(head) + len(record) <= LAST_BYTES else MAGIC) + record
        path = self.directory / f"{self._end:020d}.log"
        self._reserve.become(path, data)
        self._reserve = None
        with self._mutex:
            self._segments.append(FileSegment(path, self._end, create=False))
        self._end = self._segments[-1].end

    def _in_memory(self) -> list[MemorySegment]:
        with self._mutex:
            return [segment for segment in self._segments if isinstance(segment, MemorySegment)]

    def _has_room(self, size: int) -> bool:
        """Return whether `size` bytes are free, to avoid repeated failing writes to a full disk."""
        try:
            disk = os.statvfs(self.directory or ".")
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize >= size

    def _replace(self, segment: MemorySegment, file: FileSegment) -> None:
        with self._mutex:
            is_held = segment in self._segments
            self._segments = [file if held is segment else held for held in self._segments]
        if segment is self._active:
            self._active = file
        if not is_held:
            # The sender has called `forget` for this segment meanwhile.
            with contextlib.suppress(OSError):
                file.delete()

    def _records_from(self, segment: LogSegment, position: int) -> list[Record]:
        """Return the records of one segment that begin at `position` or later."""
        records, at = [], segment.base + len(MAGIC)
        while at < segment.end:
            record = self._read_one(segment, at)
            if record.begin >= position:
                records.append(record)
            at = record.end
        return records

    def read(self, position: int) -> Record | None:
        """Return the first complete record at or after `position`; None if there is none yet."""
        while position < self._end:
            segment = self._segment_at(position)
            if segment is None:
                return None
            if position < segment.base + len(MAGIC):
                position = segment.base + len(MAGIC)
            if position < segment.end:
                try:
                    return self._read_one(segment, position)
                except TornRecordError:
                    self._torn[segment.base] = segment.end - position
            following = self._segment_after(segment)
            if following is None:
                return None
            position = following.base
        return None

    def _read_one(self, segment: LogSegment, position: int) -> Record:
        header = segment.read(position, FRAME.size)
        if len(header) < FRAME.size:
            raise TornRecordError("the frame is cut off")
        length = FRAME.unpack(header)[0]
        end = position + FRAME.size + length
        if end > segment.end:
            raise TornRecordError("the payload is cut off")
        payload = segment.read(position + FRAME.size, length)
        return Record(check_frame(header, payload), payload, position, end)

    def _segment_at(self, position: int) -> LogSegment | None:
        with self._mutex:
            return next((s for s in self._segments if position < s.end), None)

    def _segment_after(self, segment: LogSegment) -> LogSegment | None:
        with self._mutex:
            return next((s for s in self._segments if s.base > segment.base), None)

    def preamble_before(self, position: int) -> list[Record]:
        """Return the registration and catalogue records that a reader starting at `position` needs."""
        segment = self._segment_at(position)
        if segment is None:
            with self._mutex:
                segment = self._segments[-1] if self._segments else None
        preamble: list[Record] = []
        at = segment.base if segment is not None else position
        while at < position and (record := self.read(at)) is not None and record.begin < position:
            if record.kind in (RecordKind.REGISTRATION, RecordKind.TENSORS):
                preamble.append(record)
            at = record.end
        return preamble

    def forget(self, position: int) -> None:
        """Delete the segments that end at or before `position`, except the active one."""
        self._answered = position
        with self._mutex:
            gone = [s for s in self._segments if s.end <= position and s is not self._active]
            self._segments = [s for s in self._segments if s not in gone]
        for segment in gone:
            with contextlib.suppress(OSError):
                segment.delete()

    def flush(self) -> None:
        """fsync everything written since the last flush, including the names of new files."""
        with self._mutex:
            segments = [segment for segment in self._segments if segment.flushed < segment.length]
        if any(segment.flushed == 0 for segment in segments) and self.directory is not None:
            sync_directory(self.directory)
        for segment in segments:
            segment.flush()

    def close(self) -> None:
        """Close the files and release the lock; the records stay for `fp8scope sync`."""
        with self._mutex:
            segments, self._segments, self._active = self._segments, [], None
        for segment in segments:
            segment.close()
        if self._reserve is not None and self.trouble is None:
            self._reserve.remove()
        elif self._reserve is not None:
            self._reserve.close()
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> None:
        """Close the files in a forked child, without the mutex: its holder may not exist in the child."""
        for segment in self._segments:
            segment.close()
        if self._reserve is not None:
            self._reserve.close()
        if self._lock is not None:
            self._lock.release()

    def remove(self) -> None:
        """Close the spool and delete its folder."""
        self.close()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
