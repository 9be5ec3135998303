"""Back-pressure: how much a web process takes on at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import SlowDownError


class Gate:
    """Lets work in as long as its bytes fit a budget; one piece of work always fits an empty gate."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._inside = 0
        self._lock = threading.Lock()

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        """Take `size` bytes of the budget for as long as the context lasts.

        Raises:
            SlowDownError: they do not fit now.
        """
        with self._lock:
            if self._inside and self._inside + size > self._budget:
                raise SlowDownError(
                    "The server is busy with other batches.",
                    "Wait for the seconds in Retry-After, then send again.",
                )
            self._inside += size
        try:
            yield
        finally:
            with self._lock:
                self._inside -= size


gate = Gate(limits.BYTES_IN_FLIGHT)
