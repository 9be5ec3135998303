"""Server-sent events that notify an open page of changes, so that it fetches its content again.

Changes come from Redis (notifications.py). While Redis is unreachable, the database is polled every two
seconds instead. A stream holds no database connection while it waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, connections
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from fp8scope_dashboard.notifications import RECENT_SECONDS, recent_key

# The interval of comments, which keep proxies from closing the stream.
HEARTBEAT_SECONDS = 15.0
POLL_SECONDS = 2.0
# Redis is taken for unreachable if it does not confirm a subscription within this time.
CONFIRM_SECONDS = 5.0
# The interval of attempts to reach Redis again.
RETRY_REDIS_SECONDS = 20.0
# The interval at which a stream checks whether it must end.
WAKE_SECONDS = 3.0
# After this time the browser reconnects, and permissions are checked again.
LIFETIME_SECONDS = 900.0
# Limits per session and per process. One more ends the session's oldest stream, or is refused.
MAX_PER_SESSION = 8
MAX_STREAMS = 1_000

# By kind of change, a value that differs after such a change.
Fingerprint = Mapping[str, object]


class TooManyStreamsError(Exception):
    """This process serves MAX_STREAMS streams already."""


class StreamRegistry:
    """The open streams of this process, by session."""

    def __init__(self) -> None:
        self._open: dict[str, deque[asyncio.Event]] = defaultdict(deque)
        self.count = 0

    def enter(self, session: str) -> asyncio.Event:
        """Add a stream. Returns an event that is set when the stream must end.

        Raises:
            TooManyStreamsError: MAX_STREAMS are open.
        """
        if self.count >= MAX_STREAMS:
            raise TooManyStreamsError
        mine = self._open[session]
        if len(mine) >= MAX_PER_SESSION:
            mine.popleft().set()
            self.count -= 1
        stop = asyncio.Event()
        mine.append(stop)
        self.count += 1
        return stop

    def leave(self, session: str, stop: asyncio.Event) -> None:
        """Remove a stream, unless a newer one has already replaced it."""
        with suppress(ValueError):
            self._open[session].remove(stop)
            self.count -= 1
        if not self._open[session]:
            del self._open[session]


registry = StreamRegistry()


async def stream(
    channel: str, fingerprint: Callable[[], Fingerprint], session: str, since: float | None = None
) -> AsyncGenerator[bytes, None]:
    """The events of a channel as server-sent events, until the client disconnects or the lifetime ends.

    With `since`, a Unix time in seconds, the event "ready" has the kinds of changes since then as "changed";
    null if they are not known.
    """
    try:
        stop = registry.enter(session)
    except TooManyStreamsError:
        yield _event("busy", {})
        return
    ends = time.monotonic() + LIFETIME_SECONDS

    def over() -> bool:
        return stop.is_set() or time.monotonic() > ends

    try:
        yield b"retry: 2000\n\n"
        while not over():
            try:
                async with aclosing(_from_redis(channel, over, since)) as pieces:
                    async for piece in pieces:
                        yield piece
            except (RedisError, OSError):
                async with aclosing(_from_database(fingerprint, over, since)) as pieces:
                    async for piece in pieces:
                        yield piece
    finally:
        registry.leave(session, stop)


async def _from_redis(
    channel: str, over: Callable[[], bool], since: float | None
) -> AsyncGenerator[bytes, None]:
    client = Redis.from_url(settings.REDIS_URL, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))
    try:
        async with client.pubsub() as subscription:
            await subscription.subscribe(channel)
            await _confirmed(subscription)
            # No event is missed from here on. Earlier changes are read after it, so that none is in between.
            changed = {} if since is None else {"changed": await _changed(client, channel, since)}
            yield _event("ready", {"source": "push", **changed})
            beat = time.monotonic()
            while not over():
                message = await subscription.get_message(timeout=WAKE_SECONDS)
                if message is not None and message["type"] == "message":
                    yield _event("change", json.loads(message["data"]))
                    beat = time.monotonic()
                elif time.monotonic() - beat >= HEARTBEAT_SECONDS:
                    yield b": heartbeat\n\n"
                    beat = time.monotonic()
    finally:
        await client.aclose()


async def _confirmed(subscription: PubSub) -> None:
    """Wait until Redis has acknowledged the subscription."""
    async with asyncio.timeout(CONFIRM_SECONDS):
        while True:
            message = await subscription.get_message(timeout=CONFIRM_SECONDS)
            if message is not None and message["type"] == "subscribe":
                return


async def _changed(client: Redis, channel: str, since: float) -> list[str] | None:
    """The kinds of changes on the channel since this Unix time; None if it is too long ago."""
    if since < time.time() - RECENT_SECONDS:
        return None
    recent: dict[Any, Any] = await client.hgetall(recent_key(channel))
    return sorted(kind.decode() for kind, at in recent.items() if float(at) >= since)


async def _from_database(
    fingerprint: Callable[[], Fingerprint], over: Callable[[], bool], since: float | None
) -> AsyncGenerator[bytes, None]:
    """Poll the database every two seconds, until it is time to try Redis again."""
    ends = time.monotonic() + RETRY_REDIS_SECONDS
    # Read before "ready", so that every later change is detected.
    before = await _query(fingerprint)
    yield _event("ready", {"source": "polling", **({} if since is None else {"changed": None})})
    while not over() and time.monotonic() < ends:
        await asyncio.sleep(POLL_SECONDS)
        now = await _query(fingerprint)
        if before is not None and now is not None:
            for kind, value in now.items():
                if value != before.get(kind):
                    yield _event("change", {"kind": kind})
        yield b": heartbeat\n\n"
        before = now or before


def release_connections() -> None:
    """Return this thread's database connections to the pool, unless they are in a transaction."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


async def _query(fingerprint: Callable[[], Fingerprint]) -> Fingerprint | None:
    def query() -> Fingerprint | None:
        try:
            return fingerprint()
        except DatabaseError:
            return None
        finally:
            release_connections()

    return await sync_to_async(query)()


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
