"""The choice of batches that are judged before those of other runs.

A batch is urgent if values in it become NaN or infinite, or if its sender says so: the agent sees bounds
that are exceeded, which would cost too much here. Senders are believed at a bounded rate, so that a run that
always says so does not hold up others.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from uuid import UUID

from fp8scope_dashboard.ingest.batch import Batch
from fp8scope_dashboard.runs.models import Run

MAX_URGENT, URGENT_PER_SECOND = 120.0, 1.0
MAX_RUNS = 4096


class Budgets:
    """The urgent batches that runs may have: MAX_URGENT at once, then one a second. Kept by each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: OrderedDict[UUID, tuple[float, float]] = OrderedDict()

    def take(self, run: UUID, now: float) -> bool:
        """Return whether a run may have one more urgent batch, `now` in seconds."""
        with self._lock:
            left, at = self._left.pop(run, (MAX_URGENT, now))
            left = min(MAX_URGENT, left + (now - at) * URGENT_PER_SECOND)
            is_left = left >= 1.0
            self._left[run] = (left - is_left, now)
            while len(self._left) > MAX_RUNS:
                self._left.popitem(last=False)
            return is_left


_budgets = Budgets()


def is_urgent(run: Run, batch: Batch, *, said: bool) -> bool:
    """Return whether a scalar or tensor is newly NaN or infinite, or the sender `said` that it is urgent."""
    if batch.tensors_break:
        return True
    # The last scalars are from before the batch; as JSON, values that are not finite are texts.
    if any(not isinstance(run.last_scalars.get(name), str) for name in batch.not_finite):
        return True
    return said and _budgets.take(run.id, time.monotonic())
