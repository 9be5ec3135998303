"""Back-pressure: bound the bytes that one web process works on at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import SlowDownError


class Gate:
    """Admits requests while their bytes fit a budget. An empty gate admits a request of any size.

    Requests of one project may take half of the budget, so that one leaves room for the others.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._of_project: Counter[int | None] = Counter()
        self._inside = 0
        self._lock = threading.Lock()

    @contextmanager
    def admit(self, size: int, project: int | None = None) -> Iterator[None]:
        """Reserve `size` bytes of the budget within the context.

        Raises:
            SlowDownError: the bytes do not fit at the moment.
        """
        with self._lock:
            own = self._of_project[project]
            is_over_share = project is not None and own and own + size > self._budget // 2
            if is_over_share or (self._inside and self._inside + size > self._budget):
                raise SlowDownError(
                    "The server is busy with other batches.",
                    "Wait as long as Retry-After says, then send it again.",
                )
            self._inside += size
            self._of_project[project] += size
        try:
            yield
        finally:
            with self._lock:
                self._inside -= size
                self._of_project[project] -= size
                if not self._of_project[project]:
                    del self._of_project[project]


gate = Gate(limits.BYTES_IN_FLIGHT)
