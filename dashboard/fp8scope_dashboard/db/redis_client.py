"""A client of Redis that answers or fails in time. Nobody may wait for a Redis that hangs."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def bounded_client(url: str, connect_seconds: float, seconds: float | None = None) -> redis.Redis:
    """A client that tries once.

    Args:
        connect_seconds: the longest time for a connection.
        seconds: the longest time for an answer; None: the same.
    """
    client: redis.Redis = redis.Redis.from_url(
        url,
        socket_connect_timeout=connect_seconds,
        socket_timeout=connect_seconds if seconds is None else seconds,
        retry=Retry(NoBackoff(), 0),
    )
    return client
