"""The quotas of a token and a project in a window of time.

A request adds to counts of this process, which cost it no more than a lock. Once a second a thread exchanges
the counts with Redis in one call, so that all web processes together keep a quota, to within a second. While
Redis fails, nothing is refused that this process alone would not refuse.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import redis
from django.conf import settings

from fp8scope_dashboard.db.redis_client import bounded_client
from fp8scope_dashboard.wire.errors import SlowDownError
from fp8scope_dashboard.wire.limits import MIB

logger = logging.getLogger(__name__)

MINUTE: Final = 60
HOUR: Final = 3_600
EXCHANGE_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 0.5
KEY_PREFIX: Final = "fp8scope:quota:"

# KEYS: counts. ARGV: for each key what to add, then for each key its expiry in seconds. Returns the totals.
EXCHANGE: Final = """
local totals = {}
for i, key in ipairs(KEYS) do
    totals[i] = redis.call('INCRBY', key, ARGV[i])
    redis.call('EXPIRE', key, ARGV[#KEYS + i])
end
return totals
"""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """The most of one kind that a token, and all tokens of a project together, may send in a window.

    Attributes:
        label: what is counted, in words.
        seconds: length of the window; windows begin at multiples of it since 1970.
    """

    name: str
    label: str
    seconds: int
    token: int
    project: int

    @property
    def per(self) -> str:
        return "a minute" if self.seconds == MINUTE else "an hour"


def _quota(name: str, label: str, seconds: int, token: int) -> Quota:
    """A quota with the numbers of the environment; 0 there means no limit."""
    variable = name.upper()
    per_token = int(os.environ.get(f"FP8SCOPE_QUOTA_{variable}") or token)
    per_project = int(os.environ.get(f"FP8SCOPE_PROJECT_QUOTA_{variable}") or 4 * per_token)
    return Quota(name=name, label=label, seconds=seconds, token=per_token, project=per_project)


# A thousand agents of one run send at most 100,000 requests a minute. Windows are short, because an agent
# sends in order: what is refused holds back all that comes after it.
QUOTAS: Final[Mapping[str, Quota]] = {
    quota.name: quota
    for quota in (
        _quota("requests", "requests", MINUTE, 120_000),
        _quota("bytes", "bytes", MINUTE, 16_384 * MIB),
        _quota("runs", "new runs", HOUR, 5_000),
        _quota("tensors", "new tensors", HOUR, 20_000_000),
        _quota("console_lines", "console lines", MINUTE, 5_000_000),
    )
}


class QuotaError(SlowDownError):
    """A quota is used up; `retry_after` is the time until the next window."""

    def __init__(self, quota: Quota, limit: int, whose: str, seconds: int) -> None:
        super().__init__(
            f"This {whose} has sent its {limit:,} {quota.label} of this {quota.per.split()[1]}.",
            "Wait for the seconds in Retry-After, then send again. docs/operating.md has the quotas.",
        )
        self.retry_after = seconds


@dataclass
class _Count:
    """The counts of one window: by all processes until the last exchange, and here since then."""

    window: int
    total: int = 0
    since: int = 0

    @property
    def used(self) -> int:
        return self.total + self.since


class Exchange:
    """Adds counts in Redis. Returns their totals over all web processes."""

    def __init__(self, url: str) -> None:
        client = bounded_client(url, TIMEOUT_SECONDS)
        self._script = client.register_script(EXCHANGE)
        self._client = client

    def __call__(self, keys: Sequence[str], amounts: Sequence[int], expiries: Sequence[int]) -> list[int]:
        """Add amounts to keys.

        Raises:
            redis.RedisError: Redis does not answer or cannot store.
        """
        totals = self._script(keys=[KEY_PREFIX + key for key in keys], args=[*amounts, *expiries])
        return [int(total) for total in totals]

    def read(self, keys: Sequence[str]) -> list[int]:
        """The totals of keys.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        return [int(value or 0) for value in self._client.mget([KEY_PREFIX + key for key in keys])]


Key = tuple[str, str]
"""Whose count it is, such as `token:3`, and the name of the quota."""


@dataclass
class QuotaCounts:
    """Counts what tokens and projects send. Thread-safe.

    `exchange` runs in a thread of its own, which the first count starts; None counts in this process only.
    """

    exchange: Exchange | None = None
    quotas: Mapping[str, Quota] = field(default_factory=lambda: QUOTAS)
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Key, _Count] = {}
        self._thread: threading.Thread | None = None

    def take(self, token: int, project: int, **amounts: int) -> None:
        """Count what a token sends, unless it or its project has used up a quota.

        A quota is used up once its number is reached: a message that begins below it is taken whole.

        Raises:
            QuotaError: then nothing is counted.
        """
        now = self.clock()
        with self._lock:
            counts = []
            for name, amount in amounts.items():
                quota = self.quotas[name]
                for whose, subject, limit in (
                    ("token", f"token:{token}", quota.token),
                    ("project", f"project:{project}", quota.project),
                ):
                    count = self._count((subject, name), int(now // quota.seconds))
                    if 0 < limit <= count.used:
                        left = math.ceil((count.window + 1) * quota.seconds - now)
                        raise QuotaError(quota, limit, whose, max(1, left))
                    counts.append((count, amount))
            for count, amount in counts:
                count.since += amount
        if self._thread is None and self.exchange is not None:
            self._start()

    def note(self, token: int, project: int, **amounts: int) -> None:
        """Count what a token has sent, whatever its quota."""
        now = self.clock()
        with self._lock:
            for name, amount in amounts.items():
                for subject in (f"token:{token}", f"project:{project}"):
                    self._count((subject, name), int(now // self.quotas[name].seconds)).since += amount

    def swap(self) -> None:
        """Exchange the counts since the last time. Counts that Redis does not take wait for the next time."""
        if self.exchange is None:
            return
        now = self.clock()
        with self._lock:
            self._forget(now)
            changed = [(key, count, count.since) for key, count in self._counts.items() if count.since]
        if not changed:
            return
        keys = [f"{subject}:{name}:{count.window}" for (subject, name), count, _ in changed]
        expiries = [2 * self.quotas[name].seconds for (_, name), _, _ in changed]
        totals = self.exchange(keys, [amount for _, _, amount in changed], expiries)
        with self._lock:
            for (_, count, amount), total in zip(changed, totals, strict=True):
                count.since -= amount
                count.total = total

    def used(self, subjects: Sequence[str]) -> dict[Key, int]:
        """Return what was counted in the present windows, for each of these subjects and each quota.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        now = self.clock()
        keys = [(subject, name) for subject in subjects for name in self.quotas]
        if self.exchange is None or not keys:
            return dict.fromkeys(keys, 0)
        names = [f"{subject}:{name}:{int(now // self.quotas[name].seconds)}" for subject, name in keys]
        return dict(zip(keys, self.exchange.read(names), strict=True))

    def _count(self, key: Key, window: int) -> _Count:
        count = self._counts.get(key)
        if count is None or count.window != window:
            count = self._counts[key] = _Count(window)
        return count

    def _forget(self, now: float) -> None:
        """Drop the counts of earlier windows."""
        for key, count in list(self._counts.items()):
            if count.window != int(now // self.quotas[key[1]].seconds):
                del self._counts[key]

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fp8scope-quotas", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        is_failing = False
        while True:
            time.sleep(EXCHANGE_SECONDS)
            try:
                self.swap()
                is_failing = False
            except redis.RedisError as error:
                if not is_failing:
                    logger.warning(
                        "Quotas count per process, because Redis does not answer (%s).", type(error).__name__
                    )
                is_failing = True


counts = QuotaCounts(Exchange(settings.REDIS_URL))
