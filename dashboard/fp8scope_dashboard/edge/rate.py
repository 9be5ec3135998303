"""The rate at which a client may send requests: token buckets."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class Rate:
    """Token buckets by key: `burst` requests at once, then `per_second`.

    Keeps at most `most` keys and drops the least recently used. Counts in this process only. Not thread-safe:
    use it from one event loop.
    """

    def __init__(
        self, burst: float, per_second: float, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._most = most
        self._clock = clock
        # By key: the tokens left, and when they were counted.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """The number of keys that are kept."""
        return len(self._buckets)

    def take(self, key: str) -> bool:
        """Take one token of a key; False if it has none left."""
        now = self._clock()
        tokens, counted_at = self._buckets.pop(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - counted_at) * self._per_second)
        is_allowed = tokens >= 1.0
        self._buckets[key] = (tokens - 1.0 if is_allowed else tokens, now)
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return is_allowed
