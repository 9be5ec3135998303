"""Throttle password attempts by user name and by client address.

After a number of free attempts, each further one must wait. An attempt counts before its password is checked,
so that concurrent attempts all count. The counts are in Redis, shared by all web processes; if Redis fails,
each process counts in memory. Sign-in links do not count, so a throttled user can still use one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import redis
from django.conf import settings

from fp8scope_dashboard.db.redis_client import bounded_client

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# All users behind an address, such as an office or an untrusted proxy, share its attempts.
FREE_ATTEMPTS = 5
FREE_ATTEMPTS_PER_ADDRESS = 20
MAX_WAIT_SECONDS = 60.0
# A count expires after this long without an attempt. In memory, at most this many are kept.
EXPIRY_SECONDS = 900.0
MAX_KEYS = 10_000
NAME_LENGTH = 150
TIMEOUT_SECONDS = 0.5
# Redis is not tried again for this long after a failure.
PAUSE_SECONDS = 5.0
KEY_PREFIX = "fp8scope:signin:"

# KEYS: the keys that an attempt counts for. ARGV: the longest wait and the expiry in milliseconds, then the
# free attempts of each key. Returns the milliseconds to wait and the key that requires it. A wait of 0 means
# that the attempt is allowed and counted.
ADMIT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local wait, which = 0, 0
for i, key in ipairs(KEYS) do
    local stored = redis.call('HMGET', key, 'count', 'last')
    local over = (tonumber(stored[1]) or 0) - tonumber(ARGV[2 + i])
    if over >= 0 then
        local pause = math.min(tonumber(ARGV[1]), 1000 * 2 ^ math.min(over, 16))
        local left = (tonumber(stored[2]) or 0) + pause - now
        if left > wait then wait, which = left, i end
    end
end
if wait > 0 then return {math.ceil(wait), which} end
for _, key in ipairs(KEYS) do
    redis.call('HINCRBY', key, 'count', 1)
    redis.call('HSET', key, 'last', string.format('%.0f', now))
    redis.call('PEXPIRE', key, ARGV[2])
end
return {0, 0}
"""
# KEYS: name, address. Resets the name and gives the address one attempt back.
FORGIVE = """
redis.call('DEL', KEYS[1])
if (tonumber(redis.call('HGET', KEYS[2], 'count')) or 0) > 0 then
    redis.call('HINCRBY', KEYS[2], 'count', -1)
end
return 0
"""


@dataclass(frozen=True)
class Key:
    """A key that attempts are counted for, and its number of free attempts."""

    text: str
    free: int


class MemoryCounts:
    """Counts attempts in the memory of this process. Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        expiry: float = EXPIRY_SECONDS,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._clock = clock
        self._expiry = expiry
        self._max_keys = max_keys
        self._lock = threading.Lock()
        # The number of attempts and the time of the last one.
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def admit(self, keys: Sequence[Key]) -> tuple[float, Key]:
        """Count an attempt unless it must wait. Returns the seconds to wait, 0 if counted, and their key."""
        with self._lock:
            now = self._clock()
            wait, which = max(((self._wait(key, now), key) for key in keys), key=lambda pair: pair[0])
            if wait > 0:
                return wait, which
            for key in keys:
                self._counts[key.text] = (self._of(key.text, now)[0] + 1, now)
                self._counts.move_to_end(key.text)
            while len(self._counts) > self._max_keys:
                self._counts.popitem(last=False)
            return 0.0, which

    def forgive(self, name: Key, address: Key) -> None:
        """Reset the name and give the address one attempt back, after a correct password."""
        with self._lock:
            self._counts.pop(name.text, None)
            count, last = self._of(address.text, self._clock())
            if count > 0:
                self._counts[address.text] = (count - 1, last)

    def __len__(self) -> int:
        return len(self._counts)

    def _wait(self, key: Key, now: float) -> float:
        count, last = self._of(key.text, now)
        if count < key.free:
            return 0.0
        return max(0.0, last + min(MAX_WAIT_SECONDS, 2.0 ** min(count - key.free, 16)) - now)

    def _of(self, text: str, now: float) -> tuple[int, float]:
        count, last = self._counts.get(text, (0, 0.0))
        return (count, last) if now - last < self._expiry else (0, 0.0)


class RedisCounts:
    """Counts attempts in Redis, for all web processes."""

    def __init__(self, url: str, *, expiry: float = EXPIRY_SECONDS) -> None:
        self._expiry = expiry
        client = bounded_client(url, TIMEOUT_SECONDS)
        self._admit = client.register_script(ADMIT)
        self._forgive = client.register_script(FORGIVE)

    def admit(self, keys: Sequence[Key]) -> tuple[float, Key]:
        """As `MemoryCounts.admit`.

        Raises:
            redis.RedisError: Redis does not answer or cannot store.
        """
        bounds = [int(1000 * MAX_WAIT_SECONDS), int(1000 * self._expiry), *(key.free for key in keys)]
        wait, which = self._admit(keys=[KEY_PREFIX + key.text for key in keys], args=bounds)
        # Lua counts from 1. Without a wait, 0 selects the last key, which callers ignore.
        return int(wait) / 1000, keys[int(which) - 1]

    def forgive(self, name: Key, address: Key) -> None:
        """As `MemoryCounts.forgive`.

        Raises:
            redis.RedisError: Redis does not answer or cannot store.
        """
        self._forgive(keys=[KEY_PREFIX + name.text, KEY_PREFIX + address.text])


class Attempts:
    """Throttles attempts by name and by address. Thread-safe.

    Counts in `shared`, or in memory if that is None or fails. Names need not exist.
    """

    def __init__(
        self,
        shared: RedisCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._shared = shared
        self._memory = MemoryCounts(clock, max_keys=max_keys)
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._resume_at = float("-inf")
        # By address, the time until which this process knows that it must wait.
        self._refused: OrderedDict[str, float] = OrderedDict()

    def admit(self, name: str, address: str) -> int:
        """Count an attempt, unless it must wait. Returns the whole seconds to wait, 0 if it is counted."""
        keys = keys_of(name, address)
        wait, which = self._with_counts(lambda counts: counts.admit(keys))
        if wait > 0 and which == keys[1]:
            with self._lock:
                self._refused[address] = self._clock() + wait
                self._refused.move_to_end(address)
                while len(self._refused) > self._max_keys:
                    self._refused.popitem(last=False)
        return math.ceil(wait)

    def refused_for(self, address: str) -> int:
        """Whole seconds that an address must wait, as far as this process knows. Does not use Redis."""
        until = self._refused.get(address)
        return 0 if until is None else max(0, math.ceil(until - self._clock()))

    def succeeded(self, name: str, address: str) -> None:
        """Reset the name and give the address one attempt back, after a correct password."""
        keys = keys_of(name, address)
        self._with_counts(lambda counts: counts.forgive(*keys))

    def _with_counts(self, operation: Callable[[RedisCounts | MemoryCounts], Result]) -> Result:
        if self._shared is not None and self._clock() >= self._resume_at:
            try:
                return operation(self._shared)
            except redis.RedisError as error:
                self._resume_at = self._clock() + PAUSE_SECONDS
                logger.warning(
                    "Redis is unavailable (%s): counting sign-in attempts in memory.", type(error).__name__
                )
        return operation(self._memory)


def keys_of(name: str, address: str) -> tuple[Key, Key]:
    """The keys of a name and an address. Both are hashed, so that Redis stores no personal data."""
    folded = name.strip().casefold()[:NAME_LENGTH]
    digests = (hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32] for text in (folded, address))
    return Key(f"name:{next(digests)}", FREE_ATTEMPTS), Key(
        f"address:{next(digests)}", FREE_ATTEMPTS_PER_ADDRESS
    )


attempts = Attempts(RedisCounts(settings.REDIS_URL))
