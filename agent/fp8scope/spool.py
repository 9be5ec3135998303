"""The spool: an append-only log of records on disk, which is also the queue between training and the network.

A spool is one writer's folder. Its segments are files named by the position of their first byte, and each
begins with what a reader needs (the run's registration and the tensor catalogue), so that acknowledged ones
can go. Where a file cannot be written the log goes on in memory, within a bound, and returns to files when it
can.

One thread appends; another reads and forgets. Positions count bytes since the beginning of the spool.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fp8scope.records import (
    FRAME,
    MAX_PAYLOAD,
    Bytes,
    Kind,
    Record,
    TornRecordError,
    check_frame,
    frame,
    size_of,
)
from fp8scope.segments import FileSegment, Lock, MemorySegment, Owner, Segment, sync_directory

MAGIC = b"FP8SPL\x00\x01"
SEGMENT_BYTES = 16 << 20
MEMORY_SEGMENT_BYTES = 1 << 20
RESERVE_BYTES = 16 << 20
"""Memory for what is not a row: an evaluation or the end of the run still goes in when rows are dropped."""

Preamble = Callable[[], Sequence[tuple[Kind, bytes]]]


def find_spools(directory: Path) -> Iterator[Path]:
    """Every spool at or below `directory`; others may remove theirs meanwhile."""
    for folder, names, files in os.walk(directory):
        names.sort()
        if "cursor" in files:
            yield Path(folder)


class SpoolFullError(OSError):
    """Neither the disk nor the memory set aside for it can take the record."""


class Spool:
    """The log. `directory` None keeps everything in memory.

    `owner`: who writes to it from now on (None: nobody, it is only read to the end). `durable`: `append`
    returns when the disk has the record, not when the kernel has.
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
    ) -> None:
        self.directory = directory
        self._torn: dict[int, int] = {}
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._memory_segment_bytes = min(MEMORY_SEGMENT_BYTES, memory_bytes // 4)
        self._segment_bytes = max(min(SEGMENT_BYTES, max_bytes // 8), 64 << 10)
        self._preamble = preamble
        self._mutex = threading.Lock()
        self._segments: list[Segment] = []
        self._lock = Lock(directory, owner) if directory is not None else None
        self._durable = durable
        self._active: Segment | None = None
        self._end = 0
        for path in sorted(directory.glob("*.log")) if directory is not None else ():
            if path.stem.isdecimal():
                self._segments.append(FileSegment(path, int(path.stem), create=False))
        if self._segments:
            self._end = self._segments[-1].end

    @property
    def end(self) -> int:
        """The position after the last whole record."""
        return self._end

    @property
    def begin(self) -> int:
        """The position of the oldest byte still held."""
        with self._mutex:
            return self._segments[0].base if self._segments else self._end

    @property
    def torn(self) -> int:
        """Bytes that reading skipped because they were no whole records."""
        return sum(self._torn.values())

    def in_memory(self) -> bool:
        """Whether some of what is held would die with the process."""
        with self._mutex:
            return any(isinstance(segment, MemorySegment) for segment in self._segments)

    def append(self, kind: Kind, *payload: Bytes) -> None:
        """Add a record: once this returns it survives the death of the process (unless `in_memory`).

        The payload may come in pieces. Raises SpoolFullError when the bounds are reached.
        """
        size = size_of(payload)
        if size > MAX_PAYLOAD:
            raise SpoolFullError(f"a record of {size} bytes is too large")
        size += FRAME.size
        if kind is Kind.ROW and self._end - self.begin + size > self._max_bytes:
            raise SpoolFullError(f"the spool has reached its bound of {self._max_bytes >> 20} MiB")
        if self._active is None or self._active.length >= self._size_of(self._active):
            self._roll(kind, size)
        assert self._active is not None
        header = frame(kind, *payload)
        try:
            self._active.append(header, *payload)
        except OSError:
            self._roll(kind, size, memory=True)
            self._active.append(header, *payload)
        self._end = self._active.end

    def _size_of(self, segment: Segment) -> int:
        return self._memory_segment_bytes if isinstance(segment, MemorySegment) else self._segment_bytes

    def _roll(self, kind: Kind, size: int, *, memory: bool = False) -> None:
        """Begin a segment: in a file when that works, else in memory."""
        head = MAGIC + b"".join(frame(kind, payload) + payload for kind, payload in self._preamble())
        segment: Segment | None = None
        if self.directory is not None and not memory:
            segment = self._new_file(head)
        if segment is None:
            with self._mutex:
                held = sum(s.length for s in self._segments if isinstance(s, MemorySegment))
            bound = self._memory_bytes + (0 if kind is Kind.ROW else RESERVE_BYTES)
            if held + len(head) + max(size, self._memory_segment_bytes) > bound:
                raise SpoolFullError(f"the disk takes no more, and {held >> 10} KiB of memory are in use")
            segment = MemorySegment(self._end)
            segment.append(head)
        with self._mutex:
            self._segments.append(segment)
        self._active = segment
        self._end = segment.end

    def _new_file(self, head: bytes) -> FileSegment | None:
        assert self.directory is not None
        path = self.directory / f"{self._end:020d}.log"
        try:
            segment = FileSegment(path, self._end, create=True, durable=self._durable)
        except OSError:
            return None
        try:
            segment.append(head)
        except OSError:
            with contextlib.suppress(OSError):
                segment.delete()
            return None
        if self._durable:
            sync_directory(self.directory)
        return segment

    def read(self, position: int) -> Record | None:
        """The first whole record at or after `position`; None when there is none yet."""
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

    def _read_one(self, segment: Segment, position: int) -> Record:
        header = segment.read(position, FRAME.size)
        if len(header) < FRAME.size:
            raise TornRecordError("the frame is cut off")
        length = FRAME.unpack(header)[0]
        end = position + FRAME.size + length
        if end > segment.end:
            raise TornRecordError("the payload is cut off")
        payload = segment.read(position + FRAME.size, length)
        return Record(check_frame(header, payload), payload, position, end)

    def _segment_at(self, position: int) -> Segment | None:
        with self._mutex:
            return next((s for s in self._segments if position < s.end), None)

    def _segment_after(self, segment: Segment) -> Segment | None:
        with self._mutex:
            return next((s for s in self._segments if s.base > segment.base), None)

    def preamble_before(self, position: int) -> list[Record]:
        """The registration and catalogue records that a reader starting at `position` needs."""
        segment = self._segment_at(position)
        if segment is None:
            with self._mutex:
                segment = self._segments[-1] if self._segments else None
        found: list[Record] = []
        at = segment.base if segment is not None else position
        while at < position and (record := self.read(at)) is not None and record.begin < position:
            if record.kind in (Kind.REGISTRATION, Kind.TENSORS):
                found.append(record)
            at = record.end
        return found

    def forget(self, position: int) -> None:
        """Remove the segments that end at or before `position`, except the one being written."""
        with self._mutex:
            gone = [s for s in self._segments if s.end <= position and s is not self._active]
            self._segments = [s for s in self._segments if s not in gone]
        for segment in gone:
            with contextlib.suppress(OSError):
                segment.delete()

    def flush(self) -> None:
        """fsync what was written since the last time, and the names of the files."""
        with self._mutex:
            segments = [segment for segment in self._segments if segment.flushed < segment.length]
        if any(segment.flushed == 0 for segment in segments) and self.directory is not None:
            sync_directory(self.directory)
        for segment in segments:
            segment.flush()

    def close(self) -> None:
        """Let go of files and lock; what is held stays for `fp8scope sync`."""
        with self._mutex:
            segments, self._segments, self._active = self._segments, [], None
        for segment in segments:
            segment.close()
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> None:
        """Let go of the files in a forked child; takes no lock, whose owner may not exist here."""
        for segment in self._segments:
            segment.close()
        if self._lock is not None:
            self._lock.release()

    def remove(self) -> None:
        """Close, and delete the folder: everything in it was acknowledged."""
        self.close()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
