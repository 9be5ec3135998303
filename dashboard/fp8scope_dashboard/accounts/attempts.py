"""How fast passwords can be tried: after some wrong ones, each further attempt at a name has to wait longer.

Kept in the memory of each web process: it needs no other server, and whoever signs in with a link never meets
it. Of a stranger's attempts a person notices at most the longest wait.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

FREE_ATTEMPTS = 5
LONGEST_WAIT = 60.0
# A name is forgotten after so long without an attempt, or when so many others have been tried since.
MEMORY_SECONDS = 900.0
MOST_NAMES = 10_000
NAME_LENGTH = 150


class Attempts:
    """Wrong passwords by name; names need not exist."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # The count of wrong ones, and when the last was.
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait(self, name: str) -> float:
        """Seconds until the next attempt at this name is looked at; 0: now."""
        with self._lock:
            count, last = self._of(name)
            if count < FREE_ATTEMPTS:
                return 0.0
            pause = min(LONGEST_WAIT, 2.0 ** min(count - FREE_ATTEMPTS, 16))
            return max(0.0, last + pause - self._clock())

    def failed(self, name: str) -> None:
        """A wrong password."""
        with self._lock:
            count, _ = self._of(name)
            self._wrong[_key(name)] = (count + 1, self._clock())
            self._wrong.move_to_end(_key(name))
            while len(self._wrong) > MOST_NAMES:
                self._wrong.popitem(last=False)

    def succeeded(self, name: str) -> None:
        """The right one."""
        with self._lock:
            self._wrong.pop(_key(name), None)

    def _of(self, name: str) -> tuple[int, float]:
        count, last = self._wrong.get(_key(name), (0, 0.0))
        return (count, last) if self._clock() - last < MEMORY_SECONDS else (0, 0.0)


def _key(name: str) -> str:
    return name.strip().casefold()[:NAME_LENGTH]
