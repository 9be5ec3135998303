"""Counts of several processes in one hash of Redis."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings
from helpers.waiting import wait_until

from fp8scope_dashboard.instrumentation import counts as counts_module
from fp8scope_dashboard.instrumentation.counts import HASH, CountStore, Key, MetricCounts

KEY: Key = ("fp8scope_test", ("a",), "")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.delete(HASH)
        yield
        client.delete(HASH)


def process() -> MetricCounts:
    """Counts of one of several processes."""
    return MetricCounts(CountStore(settings.REDIS_URL))


def test_it_works() -> None:
    web, worker = process(), process()
    web.add(KEY, 2.0)
    web.add(KEY, 0.5)
    worker.add(KEY, 1.0)
    worker.add(("fp8scope_test", ("b",), "+Inf"), 3.0)
    web.swap()
    worker.swap()
    web.swap()
    assert process().read() == {KEY: 3.5, ("fp8scope_test", ("b",), "+Inf"): 3.0}


def test_a_thread_hands_counts_over() -> None:
    counts = process()
    counts.add(KEY, 1.0)
    wait_until(lambda: counts.read().get(KEY) == 1.0, "the count")


def test_labels_keep_any_text() -> None:
    counts, key = process(), ("fp8scope_test", ('a "b"', "c,d\n"), "")
    counts.add(key, 1.0)
    counts.swap()
    assert counts.read() == {key: 1.0}


def test_counts_wait_while_redis_is_away(caplog: pytest.LogCaptureFixture) -> None:
    counts = MetricCounts(CountStore("redis://127.0.0.1:1/0"))
    with caplog.at_level(logging.WARNING, "fp8scope_dashboard.instrumentation.counts"):
        counts.add(KEY, 1.0)
        with pytest.raises(redis.RedisError):
            counts.swap()
        counts.add(KEY, 1.0)
        wait_until(lambda: "Metrics wait" in caplog.text, "the warning")
    counts._store = CountStore(settings.REDIS_URL)
    counts.swap()
    wait_until(lambda: counts.read() == {KEY: 2.0}, "both counts")


def test_nothing_is_lost_or_doubled_between_threads() -> None:
    counts = process()

    def count() -> None:
        for _ in range(500):
            counts.add(KEY, 1.0)
            if threading.get_ident() % 2:
                counts.swap()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.swap()
    assert counts.read()[KEY] == 2_000.0


def test_a_forked_process_counts_by_itself() -> None:
    counts = process()
    counts.add(KEY, 1.0)
    if (child := os.fork()) == 0:
        status = 1
        try:
            counts.add(KEY, 10.0)
            counts.swap()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    counts.swap()
    assert counts.read() == {KEY: 11.0}


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "MAX_KEYS", 3)
    counts = process()
    for number in range(10):
        counts.add(("fp8scope_test", (str(number),), ""), 1.0)
    counts.add(("fp8scope_test", ("0",), ""), 1.0)
    counts.swap()
    assert sorted(counts.read().items()) == [
        (("fp8scope_test", ("0",), ""), 2.0),
        (("fp8scope_test", ("1",), ""), 1.0),
        (("fp8scope_test", ("2",), ""), 1.0),
    ]
