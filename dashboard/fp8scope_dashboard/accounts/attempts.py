"""How fast passwords can be tried: after some attempts at a name, or from an address, each further one waits.

An attempt is counted before its password is looked at, so that many at the same moment are many. All web
processes count in Redis. Where Redis does not answer, each counts in its memory, so that nobody is locked out
and nobody may try without bound. Sign-in links are never counted: the wait ends by itself, and a link goes
around it.
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
from redis.backoff import NoBackoff
from redis.retry import Retry

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

# People behind one address (an office, a proxy that is not trusted) share its attempts.
FREE_ATTEMPTS = 5
FREE_ATTEMPTS_PER_ADDRESS = 20
LONGEST_WAIT = 60.0
# A name or an address is forgotten after so long without an attempt; in memory also when so many others have
# been tried since.
MEMORY_SECONDS = 900.0
MOST_KEYS = 10_000
NAME_LENGTH = 150
TIMEOUT_SECONDS = 0.5
# After a failure Redis is left alone for so long.
PAUSE_SECONDS = 5.0
KEY_PREFIX = "fp8scope:signin:"

# KEYS: each key that an attempt counts for. ARGV: the longest wait, the memory, and for each key its free
# attempts. Returns the milliseconds to wait and for which key; 0: go ahead, the attempt is counted.
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
# KEYS: name, address. The name begins again; the address gets this one attempt back.
FORGIVE = """
redis.call('DEL', KEYS[1])
if (tonumber(redis.call('HGET', KEYS[2], 'count')) or 0) > 0 then
    redis.call('HINCRBY', KEYS[2], 'count', -1)
end
return 0
"""


@dataclass(frozen=True)
class Key:
    """Something that attempts are counted for."""

    text: str
    free: int


class MemoryCounts:
    """Attempts counted in this process's memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # The count of attempts, and when the last was.
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def admit(self, keys: Sequence[Key]) -> tuple[float, Key]:
        """Seconds to wait, and the key that asks for them; 0: go ahead, the attempt is counted."""
        with self._lock:
            now = self._clock()
            wait, which = max(((self._wait(key, now), key) for key in keys), key=lambda pair: pair[0])
            if wait > 0:
                return wait, which
            for key in keys:
                self._counts[key.text] = (self._of(key.text, now)[0] + 1, now)
                self._counts.move_to_end(key.text)
            while len(self._counts) > MOST_KEYS:
                self._counts.popitem(last=False)
            return 0.0, which

    def forgive(self, name: Key, address: Key) -> None:
        """The password was right."""
        with self._lock:
            self._counts.pop(name.text, None)
            count, last = self._of(address.text, self._clock())
            if count > 0:
                self._counts[address.text] = (count - 1, last)

    def _wait(self, key: Key, now: float) -> float:
        count, last = self._of(key.text, now)
        if count < key.free:
            return 0.0
        return max(0.0, last + min(LONGEST_WAIT, 2.0 ** min(count - key.free, 16)) - now)

    def _of(self, text: str, now: float) -> tuple[int, float]:
        count, last = self._counts.get(text, (0, 0.0))
        return (count, last) if now - last < MEMORY_SECONDS else (0, 0.0)


class RedisCounts:
    """Attempts counted in Redis, by its clock, for all web processes."""

    def __init__(self, url: str) -> None:
        client = redis.Redis.from_url(
            url,
            socket_connect_timeout=TIMEOUT_SECONDS,
            socket_timeout=TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._admit = client.register_script(ADMIT)
        self._forgive = client.register_script(FORGIVE)

    def admit(self, keys: Sequence[Key]) -> tuple[float, Key]:
        """As `MemoryCounts.admit`.

        Raises:
            redis.RedisError: it does not answer, or cannot store.
        """
        bounds = [int(1000 * LONGEST_WAIT), int(1000 * MEMORY_SECONDS), *(key.free for key in keys)]
        wait, which = self._admit(keys=[KEY_PREFIX + key.text for key in keys], args=bounds)
        # 1 is the first key; 0, none, becomes the last, which does not matter.
        return int(wait) / 1000, keys[int(which) - 1]

    def forgive(self, name: Key, address: Key) -> None:
        """As `MemoryCounts.forgive`.

        Raises:
            redis.RedisError: as above.
        """
        self._forgive(keys=[KEY_PREFIX + name.text, KEY_PREFIX + address.text])


class Attempts:
    """Attempts by name and by address, counted in Redis, or in memory while Redis is away. Thread-safe.

    Names need not exist.
    """

    def __init__(
        self, shared: RedisCounts | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shared = shared
        self._memory = MemoryCounts(clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._resume_at = float("-inf")
        # Until when an address has to wait, as far as this process knows.
        self._refused: OrderedDict[str, float] = OrderedDict()

    def admit(self, name: str, address: str) -> int:
        """Whole seconds until an attempt at this name from this address is looked at.

        0: go ahead; the attempt is counted.
        """
        keys = _keys(name, address)
        wait, which = self._ask(lambda counts: counts.admit(keys))
        if wait > 0 and which == keys[1]:
            with self._lock:
                self._refused[address] = self._clock() + wait
                self._refused.move_to_end(address)
                while len(self._refused) > MOST_KEYS:
                    self._refused.popitem(last=False)
        return math.ceil(wait)

    def refused_for(self, address: str) -> int:
        """Whole seconds that an address has to wait, as far as this process knows without asking Redis."""
        until = self._refused.get(address)
        return 0 if until is None else max(0, math.ceil(until - self._clock()))

    def succeeded(self, name: str, address: str) -> None:
        """The password was right: the name begins again, and the address gets the attempt back."""
        keys = _keys(name, address)
        self._ask(lambda counts: counts.forgive(*keys))

    def _ask(self, question: Callable[[RedisCounts | MemoryCounts], Answer]) -> Answer:
        if self._shared is not None and self._clock() >= self._resume_at:
            try:
                return question(self._shared)
            except redis.RedisError as error:
                self._resume_at = self._clock() + PAUSE_SECONDS
                logger.warning(
                    "Redis is away (%s): sign-in attempts are counted in this process.", type(error).__name__
                )
        return question(self._memory)


def _keys(name: str, address: str) -> tuple[Key, Key]:
    """The keys of a name and of an address, without either in the clear."""
    folded = name.strip().casefold()[:NAME_LENGTH]
    digests = (hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32] for text in (folded, address))
    return Key(f"name:{next(digests)}", FREE_ATTEMPTS), Key(
        f"address:{next(digests)}", FREE_ATTEMPTS_PER_ADDRESS
    )


attempts = Attempts(RedisCounts(settings.REDIS_URL))
