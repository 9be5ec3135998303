"""The time that agents gather rows before their next batch, so that a busy server gets fewer, larger batches.

A batch costs about the same for one row as for fifty. So each answer says after which pause the next batch
suits the server: short where few writers send, so that alerts come soon, and longer the more of them there
are and the more processor time a message takes on this machine. Agents have bounds of their own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from uuid import UUID

MAX_SHARE: Final = 0.2
"""Share of one process's interpreter that the batches of all its writers shall take together."""
OUTSIDE_COST: Final = 0.001
"""Seconds that each message takes outside of its thread."""
LEARNING: Final = 0.05
"""Weight of the last message in the mean cost of a message."""
LONGEST: Final = 5.0
"""A writer counts for so many seconds after a message, and no pause is longer."""


class SendingPace:
    """Counts the writers that send to this process, and what their messages cost. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cost = 0.0
        self._seen: OrderedDict[UUID, float] = OrderedDict()

    def after(self, writer: UUID, seconds: float) -> float:
        """Note a message that took so much processor time; returns the pause before the next one."""
        now, cost = self._clock(), seconds + OUTSIDE_COST
        with self._lock:
            self._cost += LEARNING * (cost - self._cost) if self._cost else cost
            self._seen[writer] = now
            self._seen.move_to_end(writer)
            while next(iter(self._seen.values())) < now - LONGEST:
                self._seen.popitem(last=False)
            return min(LONGEST, len(self._seen) * self._cost / MAX_SHARE)


pace: Final = SendingPace()
