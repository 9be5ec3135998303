"""Counts of all processes of the server together.

Adding to a count costs a lock. Once a second a thread adds what this process has counted to a hash in Redis.
So any web process answers for all processes, also for workers, which come and go. If Redis loses its memory,
counters begin at 0 again, which Prometheus takes for a restart. While Redis fails, counts wait here. If an
answer of Redis is lost, they are added twice.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Final

import redis

from fp8scope_dashboard.db.redis_client import bounded_client

logger = logging.getLogger(__name__)

Key = tuple[str, tuple[str, ...], str]
"""The name of a metric, the values of its labels, and the bucket of a histogram or an empty text."""

HASH: Final = "fp8scope:metrics"
EXCHANGE_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 0.5
MAX_KEYS: Final = 5_000
"""Counts of a process. There are some hundreds; a mistake in a label must not fill the memory."""


class CountStore:
    """Adds counts in Redis, and reads the sums of all processes."""

    def __init__(self, url: str) -> None:
        self._client = bounded_client(url, TIMEOUT_SECONDS)

    def add(self, amounts: dict[Key, float]) -> None:
        """Add amounts, all or none of them.

        Raises:
            redis.RedisError: Redis does not answer or cannot store.
        """
        with self._client.pipeline(transaction=True) as pipeline:
            for key, amount in amounts.items():
                pipeline.hincrbyfloat(HASH, json.dumps(key), amount)
            pipeline.execute()

    def read(self) -> dict[Key, float]:
        """The sums.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        sums: dict[Key, float] = {}
        for field, value in self._client.hgetall(HASH).items():
            name, labels, bucket = json.loads(field)
            sums[name, tuple(labels), bucket] = float(value)
        return sums


class MetricCounts:
    """The counts of this process since the last exchange. Thread-safe, and usable after a fork."""

    def __init__(self, store: CountStore) -> None:
        self._store = store
        self._begin()
        # A child must not add what its parent has counted, and has none of its threads.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._swapping = threading.Lock()
        self._amounts: dict[Key, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, key: Key, amount: float) -> None:
        """Add to a count. The first one starts the thread that exchanges them."""
        with self._lock:
            if key in self._amounts or len(self._amounts) < MAX_KEYS:
                self._amounts[key] = self._amounts.get(key, 0.0) + amount
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fp8scope-metrics", daemon=True)
                self._thread.start()

    def swap(self) -> None:
        """Add the counts to those in Redis. What Redis does not take waits for the next time.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        with self._swapping:
            with self._lock:
                amounts, self._amounts = self._amounts, {}
            if not amounts:
                return
            try:
                self._store.add(amounts)
            except redis.RedisError:
                with self._lock:
                    for key, amount in amounts.items():
                        self._amounts[key] = self._amounts.get(key, 0.0) + amount
                raise

    def read(self) -> dict[Key, float]:
        """The sums of all processes.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        return self._store.read()

    def _run(self) -> None:
        is_failing = False
        while True:
            time.sleep(EXCHANGE_SECONDS)
            try:
                self.swap()
                is_failing = False
            except redis.RedisError as error:
                if not is_failing:
                    logger.warning("Metrics wait until Redis answers (%s).", type(error).__name__)
                is_failing = True
