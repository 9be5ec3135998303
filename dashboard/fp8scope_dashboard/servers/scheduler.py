"""Celery's scheduler, which goes on when the system clock is set back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery.beat import PersistentScheduler

# Smaller differences are those of reading the clock twice.
TOLERANCE = timedelta(seconds=1)


class Scheduler(PersistentScheduler):  # type: ignore[misc]
    """Sends periodic tasks by the times of their last runs, of which none may lie in the future.

    After the clock was ahead and is right again, Celery would send nothing until the wrong time has come: no
    sweep for hours, also after a restart, because the times are stored.
    """

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due. Returns the seconds to wait before the next call."""
        self._forget_the_future()
        return float(super().tick(*args, **kwargs))

    def _forget_the_future(self) -> None:
        now = self.app.now()
        ahead = [entry for entry in self.schedule.values() if entry.last_run_at > now + TOLERANCE]
        for entry in ahead:
            entry.last_run_at = now
        if ahead:
            # The queue of entries is ordered by the times that were wrong.
            self.populate_heap()
