"""Reserved disk space for the information that must be stored even when the disk is full.

The file is allocated when the spool is opened, and only written in place after that. While some rows are only
in memory, it stores their number, so that they are counted even if the process is killed. If the disk is
still full when the run ends, it becomes the spool's last segment, which says how the run ended.
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
class RowCounts:
    """The number of rows that a writer has recorded (on disk or in memory), and that it has dropped."""

    recorded: int
    dropped: int

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """Return the counts that a process stored; None if all rows it had recorded were on disk."""
        with contextlib.suppress(OSError, struct.error):
            with (directory / NAME).open("rb") as file:
                raw = file.read(_COUNTS.size + 4)
            mark, recorded, dropped = _COUNTS.unpack_from(raw)
            (checksum,) = struct.unpack_from("<I", raw, _COUNTS.size)
            if mark == _MARK and checksum == zlib.crc32(raw[: _COUNTS.size]):
                return cls(recorded, dropped)
        return None


class Reserve:
    """Reserves RESERVE_BYTES of the disk, in `directory`. Raises OSError if that fails."""

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

    def note(self, counts: RowCounts | None) -> None:
        """Store counts while some rows are only in memory; None clears them: all rows are on disk again."""
        if self._descriptor < 0 or (counts is None and not self._noted):
            return
        body = bytes(_COUNTS.size) if counts is None else _COUNTS.pack(_MARK, counts.recorded, counts.dropped)
        self._noted = counts is not None
        # If even this write fails, the earlier counts stay.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, body + struct.pack("<I", zlib.crc32(body)), 0)

    def become(self, path: Path, data: bytes) -> None:
        """Turn the reserved file into a file at `path` with `data`, of at most RESERVE_BYTES.

        Raises OSError if that fails.
        """
        if len(data) > RESERVE_BYTES:
            raise OSError(f"{len(data)} bytes exceed the reserved {RESERVE_BYTES} bytes")
        self._write(data)
        os.ftruncate(self._descriptor, len(data))
        # The data must be on disk before the rename makes it visible.
        os.fsync(self._descriptor)
        os.rename(self._path, path)
        self.close()

    def remove(self) -> None:
        """Delete the file, which frees the reserved space."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Close the file without deleting it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(view):
            at += os.pwrite(self._descriptor, view[at:], at)
