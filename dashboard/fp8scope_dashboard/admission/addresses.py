"""How many requests an address may send."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class Rate:
    """Token buckets by key: `burst` requests at once, then `per_second`.

    The keys that were used longest ago are forgotten beyond `most`. Not thread-safe: for the event loop.
    """

    def __init__(
        self, burst: float, per_second: float, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._most = most
        self._clock = clock
        # What is left, and when that was.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> bool:
        """Whether one more request of this key is within the rate; it is counted if it is."""
        now = self._clock()
        left, at = self._left.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        allowed = left >= 1.0
        self._left[key] = (left - 1.0 if allowed else left, now)
        while len(self._left) > self._most:
            self._left.popitem(last=False)
        return allowed
