"""The records of an event file that grows: TFRecord framing with masked CRC-32C.

A record is its length (8 bytes), the checksum of these, the data, and the checksum of the data.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.binary.crc32c import masked_crcs

READ_BYTES: Final = 1 << 20
"""Bytes that are read at a time."""
MAX_RECORD: Final = 16 << 20
"""A longer record is passed over. Such records are graphs, images and embeddings."""
HEADER: Final = 12
FOOTER: Final = 4
_LENGTH = struct.Struct("<Q").unpack_from
_CHECKSUM = struct.Struct("<I").unpack_from


@dataclass(kw_only=True)
class FileProblem:
    """Damage of a file.

    Attributes:
        broken_at: where a length is damaged: nothing behind it can be read. None if all could be.
        damaged: the records that were left out, because their checksum is wrong.
        oversized: the records that were passed over.
    """

    broken_at: int | None = None
    damaged: int = 0
    oversized: int = 0


class RecordFile:
    """Reads the complete records of one file, from where the last call ended.

    The last record may be written in parts, by a process or by a network's file system. So a record at the
    end of the file that is not complete, or not right, waits for more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.problem = FileProblem()

    def read(self, max_bytes: int = READ_BYTES) -> tuple[list[bytes], bool]:
        """Return the next records, and whether there may be more.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.position + HEADER:
                return [], False
            file.seek(self.position)
            data = file.read(max_bytes)
            needed = self._needed(data)
            if needed > len(data):
                if not self._is_header_right(data):
                    self.problem.broken_at = self.position
                    return [], False
                self.problem.broken_at = None
                if self.position + needed > size:
                    return [], False
                if needed - HEADER - FOOTER > MAX_RECORD:
                    return [], self._pass_over(needed, size)
                data += file.read(needed - len(data))
        records = self._records(data, size)
        return records, bool(records) and self.position < size

    @staticmethod
    def _needed(data: bytes) -> int:
        """The bytes of the first record."""
        return HEADER + int(_LENGTH(data)[0]) + FOOTER if len(data) >= HEADER else HEADER

    def _pass_over(self, needed: int, size: int) -> bool:
        self.problem.oversized += 1
        self.position += needed
        return self.position < size

    @staticmethod
    def _is_header_right(data: bytes) -> bool:
        if len(data) < HEADER:
            return True
        buffer = np.frombuffer(data, np.uint8)
        crc = masked_crcs(buffer, np.zeros(1, np.int64), np.array([8]))
        return int(crc[0]) == int(_CHECKSUM(data, 8)[0])

    def _records(self, data: bytes, size: int) -> list[bytes]:
        """The records in `data`, which begins at `position`."""
        starts: list[int] = []
        lengths: list[int] = []
        at, end = 0, len(data)
        while at + HEADER <= end:
            length = _LENGTH(data, at)[0]
            if at + HEADER + length + FOOTER > end:
                break
            starts.append(at + HEADER)
            lengths.append(length)
            at += HEADER + length + FOOTER
        return self._checked(data, np.array(starts), np.array(lengths), size)

    def _checked(self, data: bytes, starts: NDArray[Any], lengths: NDArray[Any], size: int) -> list[bytes]:
        buffer = np.frombuffer(data, np.uint8)
        headers = masked_crcs(buffer, starts - HEADER, np.full(len(starts), 8))
        right = headers == _checksums_at(buffer, starts - FOOTER)
        whole = len(starts) if right.all() else int(np.argmin(right))
        self.problem.broken_at = None if whole == len(starts) else self.position + int(starts[whole]) - HEADER
        starts, lengths = starts[:whole], lengths[:whole]
        if not whole:
            return []
        ends = starts + lengths
        intact = masked_crcs(buffer, starts, lengths) == _checksums_at(buffer, ends)
        behind = int(ends[-1]) + FOOTER
        if not intact[-1] and self.position + behind >= size:
            behind = int(starts[-1]) - HEADER
            starts, ends, intact = starts[:-1], ends[:-1], intact[:-1]
        self.position += behind
        self.problem.damaged += int(np.count_nonzero(~intact))
        spans = zip(starts.tolist(), ends.tolist(), intact.tolist(), strict=True)
        return [data[start:end] for start, end, is_intact in spans if is_intact]


def _checksums_at(buffer: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
    """The stored checksums, uint32[N], at positions of a buffer."""
    parts = buffer[positions[:, None] + np.arange(4)].astype(np.uint32)
    stored: NDArray[Any] = (parts << np.arange(0, 32, 8, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    return stored
