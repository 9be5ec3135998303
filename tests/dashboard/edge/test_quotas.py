"""Counts of what tokens and projects send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import redis
from django.conf import settings

from fp8scope_dashboard.edge.quotas import Exchange, Quota, QuotaCounts, QuotaError


class Clock:
    def __init__(self) -> None:
        # Not a real time, so that no other test counts in these windows.
        self.now = 6_000_000.0

    def __call__(self) -> float:
        return self.now


def quota(token: int, project: int, seconds: int = 60) -> dict[str, Quota]:
    return {
        "requests": Quota(name="requests", label="requests", seconds=seconds, token=token, project=project)
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def process(clock: Clock) -> Callable[..., QuotaCounts]:
    """Counts of one of several web processes, which share Redis."""
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.flushdb()
    client.close()
    return lambda token, project: QuotaCounts(Exchange(settings.REDIS_URL), quota(token, project), clock)


def take(counts: QuotaCounts, times: int, token: int = 1, project: int = 1) -> int:
    """The number of requests that were let through."""
    for number in range(times):
        try:
            counts.take(token, project, requests=1)
        except QuotaError:
            return number
    return times


def test_it_works(process: Callable[..., QuotaCounts], clock: Clock) -> None:
    counts = process(10, 100)
    clock.now += 20
    assert take(counts, 50) == 10
    with pytest.raises(QuotaError) as caught:
        counts.take(1, 1, requests=1)
    assert caught.value.headers() == {"Retry-After": "40"} and caught.value.status == 429
    assert "This token has sent its 10 requests of this minute." in caught.value.message
    clock.now += 40
    assert take(counts, 50) == 10


def test_tokens_have_quotas_of_their_own_and_a_projects_in_common(
    process: Callable[..., QuotaCounts],
) -> None:
    counts = process(10, 25)
    assert [take(counts, 20, token) for token in (1, 2, 3)] == [10, 10, 5]
    assert take(counts, 20, token=4, project=2) == 10


def test_processes_share_a_quota(process: Callable[..., QuotaCounts], clock: Clock) -> None:
    first, second = process(10, 100), process(10, 100)
    assert take(first, 6) == 6
    first.swap()
    assert take(second, 1) == 1
    second.swap()
    assert take(second, 20) == 3
    clock.now += 60
    second.swap()
    assert take(second, 20) == 10


def test_redis_is_asked_once_for_all_that_was_counted(process: Callable[..., QuotaCounts]) -> None:
    counts = process(1000, 10_000)
    real = Exchange(settings.REDIS_URL)
    asked: list[int] = []

    class Counting(Exchange):
        def __call__(self, keys: Sequence[str], amounts: Sequence[int], expiries: Sequence[int]) -> list[int]:
            asked.append(len(keys))
            return super().__call__(keys, amounts, expiries)

    counts.exchange = Counting(settings.REDIS_URL)
    for token in range(20):
        take(counts, 50, token)
    counts.swap()
    counts.swap()
    assert asked == [21]
    assert real.read([f"project:1:requests:{6_000_000 // 60}"]) == [1000]


def test_without_redis_each_process_keeps_the_quota(clock: Clock) -> None:
    counts = QuotaCounts(Exchange("redis://127.0.0.1:1/0"), quota(10, 100), clock)
    assert take(counts, 5) == 5
    with pytest.raises(redis.RedisError):
        counts.swap()
    assert take(counts, 50) == 5


def test_zero_means_no_limit(clock: Clock) -> None:
    counts = QuotaCounts(None, quota(0, 0), clock)
    assert take(counts, 5000) == 5000


def test_a_refused_message_counts_for_nothing(clock: Clock) -> None:
    quotas = {**quota(5, 100)}
    quotas["bytes"] = Quota(name="bytes", label="bytes", seconds=60, token=100, project=1000)
    counts = QuotaCounts(None, quotas, clock)
    counts.take(1, 1, requests=1, bytes=500)
    for _ in range(3):
        with pytest.raises(QuotaError, match="bytes"):
            counts.take(1, 1, requests=1, bytes=1)
    counts.take(1, 1, requests=1)
    assert take(counts, 10) == 3


def test_forgets_earlier_windows(process: Callable[..., QuotaCounts], clock: Clock) -> None:
    counts = process(10, 100)
    for token in range(100):
        take(counts, 1, token)
    clock.now += 120
    counts.swap()
    assert not counts._counts
