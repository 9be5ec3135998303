"""The rows of the last steps, in memory, as they are written to the spool."""

import threading
from collections import deque
from collections.abc import Sequence

from fp8scope.recording.records import Bytes, Row

MAX_BYTES = 32 << 20


class StepRing:
    """Keeps the rows of the last `steps` steps, at most `max_bytes` bytes of them.

    The thread that records rows adds them; any thread may read.
    """

    def __init__(self, steps: int, max_bytes: int = MAX_BYTES) -> None:
        self.added = 0
        """The number of rows ever added."""
        self._rows: deque[bytes] = deque()
        self._steps = steps
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, pieces: Sequence[Bytes]) -> None:
        """Keep a row, given in pieces (`Row.pieces`). Drop the oldest beyond the limits."""
        payload = b"".join(pieces)
        with self._lock:
            self.added += 1
            self._rows.append(payload)
            self._bytes += len(payload)
            while self._rows and (len(self._rows) > self._steps or self._bytes > self._max_bytes):
                self._bytes -= len(self._rows.popleft())

    def payloads(self) -> list[bytes]:
        """The kept rows, encoded, oldest first."""
        with self._lock:
            return list(self._rows)

    def rows_since(self, added: int) -> list[Row]:
        """The kept rows that were added after `added` was read."""
        with self._lock:
            count = min(self.added - added, len(self._rows))
            payloads = [self._rows[index] for index in range(len(self._rows) - count, len(self._rows))]
        return [Row.decode(payload) for payload in payloads]

    @property
    def nbytes(self) -> int:
        """The size of the kept rows."""
        return self._bytes
