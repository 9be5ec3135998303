"""Back-pressure: bound the bytes that one web process works on at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import SlowDownError


class Gate:
    """Admits requests while their bytes fit a budget. An empty gate admits a request of any size."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._inside = 0
        self._lock = threading.Lock()

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes of the budget within the context.

        Raises:
            SlowDownError: the bytes do not fit at the moment.
        """
        with self._lock:
            if self._inside and self._inside + size > self._budget:
                raise SlowDownError(
                    "The server is busy with other batches.",
                    "Wait as long as Retry-After says, then send it again.",
                )
            self._inside += size
        try:
            yield
        finally:
            with self._lock:
                self._inside -= size


gate = Gate(limits.BYTES_IN_FLIGHT)
