"""What the spool is made of: segments in files or in memory, and the lock on its folder."""

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


class Segment(abc.ABC):
    """Consecutive bytes of the log from position `base` on."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.length = 0
        self.flushed = 0
        """As much as a crash of the machine would leave."""

    @property
    def end(self) -> int:
        return self.base + self.length

    @abc.abstractmethod
    def append(self, *pieces: Bytes) -> None:
        """Add to its end. Raises OSError where that is not possible."""

    @abc.abstractmethod
    def read(self, position: int, size: int) -> bytes:
        """`size` bytes from `position` of the log on; fewer at its end."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Ask the machine to put what was written on the disk."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    @abc.abstractmethod
    def delete(self) -> None:
        """Remove what was stored."""


class FileSegment(Segment):
    """A segment in a file. Writes go to the kernel at once: they survive the death of the process."""

    def __init__(self, path: Path, base: int, *, create: bool, durable: bool = False) -> None:
        """`durable`: a write returns when the disk has it."""
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
            # Best effort: a half record that stays is recognised as torn.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.length)
            raise
        self.length = at + size

    def _append_rest(self, data: bytes, at: int) -> None:
        """What the kernel did not take at once."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written

    def read(self, position: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, position - self.base)

    def flush(self) -> None:
        length = self.length
        # The sender may have removed the segment in this moment.
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


class MemorySegment(Segment):
    """A segment in memory: lost with the process."""

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
        """There is no disk to put it on."""

    def close(self) -> None:
        """There is no file to let go of."""

    def delete(self) -> None:
        """It goes with the object."""


def sync_directory(directory: Path) -> None:
    """Have the names of new files on the disk as well; where the system cannot, nothing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Owner:
    """The process that writes to a spool. `child`: forked from the one to which the run belongs."""

    host: str
    pid: int
    child: bool = False

    @classmethod
    def me(cls, *, child: bool = False) -> Self:
        return cls(socket.gethostname(), os.getpid(), child)

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """Who wrote to this spool; None when that is not known."""
        try:
            document = json.loads((directory / "lock").read_bytes()[:4096])
            return cls(str(document["host"]), int(document["pid"]), bool(document["child"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Lock:
    """Says that this process uses the folder; the kernel lets go of it when the process dies."""

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
