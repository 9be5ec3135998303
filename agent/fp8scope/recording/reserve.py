"""Room on the disk that a spool takes before anything else: for what must be said when the disk is full.

The file is written in full when the spool is opened, and only in place after that. While steps are in memory
alone it says how many there are, so that they are counted even if the process is killed. When the run ends
and the disk still takes nothing, it becomes the spool's last segment, which holds how the run ended.
"""

import contextlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

RESERVE_BYTES = 16 << 10
NAME = "reserve"
_COUNTS = struct.Struct("<4sQQ")
_MARK = b"RISK"


@dataclass(frozen=True)
class Counts:
    """Rows that a writer has recorded in all, on the disk or in memory, and rows that it has dropped."""

    recorded: int
    dropped: int

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """What a process said before it ended; None when all that it had recorded was on the disk."""
        with contextlib.suppress(OSError, struct.error):
            with (directory / NAME).open("rb") as file:
                raw = file.read(_COUNTS.size + 4)
            mark, recorded, dropped = _COUNTS.unpack_from(raw)
            (checksum,) = struct.unpack_from("<I", raw, _COUNTS.size)
            if mark == _MARK and checksum == zlib.crc32(raw[: _COUNTS.size]):
                return cls(recorded, dropped)
        return None


class Reserve:
    """RESERVE_BYTES of the disk, in `directory`. Raises OSError where they cannot be had."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._noted = False
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._descriptor, 0)
            self._write(bytes(RESERVE_BYTES))
        except OSError:
            self.remove()
            raise

    def note(self, counts: Counts | None) -> None:
        """Say how many rows there are while some are in memory alone; None: all are on the disk again."""
        if self._descriptor < 0 or (counts is None and not self._noted):
            return
        body = bytes(_COUNTS.size) if counts is None else _COUNTS.pack(_MARK, counts.recorded, counts.dropped)
        self._noted = counts is not None
        # A disk that refuses even this: the counts then stay as they were.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, body + struct.pack("<I", zlib.crc32(body)), 0)

    def become(self, path: Path, data: bytes) -> None:
        """Turn the room into a file at `path` that holds `data`, of RESERVE_BYTES at most.

        Raises OSError where that fails.
        """
        if len(data) > RESERVE_BYTES:
            raise OSError(f"{len(data)} bytes do not fit into {RESERVE_BYTES}")
        self._write(data)
        os.ftruncate(self._descriptor, len(data))
        # To the disk before its name says that it is there.
        os.fsync(self._descriptor)
        os.rename(self._path, path)
        self.close()

    def remove(self) -> None:
        """Give the room back."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Let go of the file, which stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(view):
            at += os.pwrite(self._descriptor, view[at:], at)
