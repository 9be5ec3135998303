"""The parts of a spool: segments in files or in memory, and the lock on its folder."""

import abc
import contextlib
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fp8scope.recording.records import Bytes, size_of


class SpoolBusyError(RuntimeError):
    """Another process is using this spool."""


class LogSegment(abc.ABC):
    """Consecutive bytes of the log, beginning at position `base`."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.length = 0
        self.flushed = 0
        """Number of bytes that would survive a crash of the machine."""

    @property
    def end(self) -> int:
        return self.base + self.length

    @abc.abstractmethod
    def append(self, *pieces: Bytes) -> None:
        """Append to the segment. Raises OSError if that fails."""

    @abc.abstractmethod
    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position` of the log, or fewer at the segment's end."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Force what was written to the disk."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abc.abstractmethod
    def delete(self) -> None:
        """Close the segment and delete its data."""


class FileSegment(LogSegment):
    """A segment in a file. Writes are unbuffered, so they survive the death of the process."""

    def __init__(self, path: Path, base: int, *, create: bool, durable: bool = False) -> None:
        """Open or create the file. With `durable`, a write returns only when it is on the disk."""
        super().__init__(base)
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(path, flags | (getattr(os, "O_DSYNC", 0) if durable else 0), 0o600)
        self.length = self.flushed = os.fstat(self._descriptor).st_size

    def append(self, *pieces: Bytes) -> None:
        size, at = size_of(pieces), self.length
        try:
            written = os.pwritev(self._descriptor, pieces, at)
            if written < size:
                self._append_rest(b"".join(pieces)[written:], at + written)
        except OSError:
            # Best effort: if the truncation fails, the partial record is recognised as torn.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.length)
            raise
        self.length = at + size

    def _append_rest(self, data: bytes, at: int) -> None:
        """Write the bytes that remain after a short write."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written

    def read(self, position: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, position - self.base)

    def flush(self) -> None:
        length = self.length
        # The sender may have deleted the segment meanwhile.
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            self.flushed = length

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class MemorySegment(LogSegment):
    """A segment in memory, which is lost with the process."""

    def __init__(self, base: int) -> None:
        super().__init__(base)
        self._data = bytearray()

    def append(self, *pieces: Bytes) -> None:
        for piece in pieces:
            self._data += piece
        self.length = len(self._data)

    def read(self, position: int, size: int) -> bytes:
        offset = position - self.base
        return bytes(self._data[offset : offset + size])

    def flush(self) -> None:
        """Do nothing: the segment is not on a disk."""

    def close(self) -> None:
        """Do nothing: the segment has no file."""

    def delete(self) -> None:
        """Do nothing: the memory is freed with the object."""


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that the names of new files are on disk. Ignored if the system cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Owner:
    """The process that writes to a spool. `child`: it was forked from the process that began the run."""

    host: str
    pid: int
    child: bool = False

    @classmethod
    def me(cls, *, child: bool = False) -> Self:
        return cls(socket.gethostname(), os.getpid(), child)

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """Return the process that wrote to this spool; None if it is unknown."""
        try:
            document = json.loads((directory / "lock").read_bytes()[:4096])
            return cls(str(document["host"]), int(document["pid"]), bool(document["child"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Lock:
    """Marks the folder as used by this process; the kernel releases the lock when the process dies."""

    def __init__(self, directory: Path, owner: Owner | None = None) -> None:
        self._take(directory)
        if owner is not None:
            os.pwrite(self._descriptor, json.dumps(asdict(owner)).encode(), 0)

    def _take(self, directory: Path) -> None:
        self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise SpoolBusyError(f"{directory} is being used by a running process") from error

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
