"""The stream of server-sent events: from Redis, by polling, and its limits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor
from django.db import connection
from django.test import AsyncClient

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.notifications import flush, run_changed
from fp8scope_dashboard.pages.live import stream as event_stream
from fp8scope_dashboard.pages.live.views import fingerprint_of
from fp8scope_dashboard.runs.models import Run, StepNote

P = ParamSpec("P")

pytestmark = pytest.mark.django_db(transaction=True)
SECONDS = 20


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test. Its queries run in this thread, on the database connection of the fixtures."""

    @wraps(test)
    def run_sync(*args: P.args, **kwargs: P.kwargs) -> None:
        # After a browser test, Playwright's loop is that of this thread until the session ends.
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            async_to_sync(test)(*args, **kwargs)
        finally:
            asyncio._set_running_loop(running)

    return run_sync


class Listener:
    """Reads a stream as a browser does."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def next(self) -> tuple[str, Any]:
        """Name and data of the next event; skips comments and settings."""
        async with asyncio.timeout(SECONDS):
            async for chunk in self._chunks:
                fields = dict(line.split(": ", 1) for line in chunk.decode().splitlines() if ": " in line)
                if "event" in fields:
                    return fields["event"], json.loads(fields["data"])
        raise AssertionError("the stream has ended")

    async def close(self) -> None:
        await self._chunks.aclose()  # type: ignore[attr-defined]


async def listen(visitor: Visitor, rest: str) -> Listener:
    client = AsyncClient()
    await client.aforce_login(visitor.user)
    answer = await client.get(visitor.address(rest))
    assert answer.status_code == 200 and answer["Content-Type"] == "text/event-stream"
    assert answer["Cache-Control"] == "no-store" and answer["X-Accel-Buffering"] == "no"
    return Listener(aiter(answer.streaming_content))  # type: ignore[attr-defined]


@pytest.fixture
def run(admin: Visitor) -> Run:
    return make_run(admin.project, "a run")


async def announce(run: Run, kind: Any, step: int | None = None) -> None:
    await sync_to_async(run_changed)(run.id, run.project_id, kind, step)
    assert await sync_to_async(flush)()


@in_loop
async def test_it_works(admin: Visitor, run: Run) -> None:
    listener = await listen(admin, f"runs/{run.id}/events")
    assert await listener.next() == ("ready", {"source": "push"})
    await announce(run, "rows", 7)
    assert await listener.next() == ("change", {"run": str(run.id), "kind": "rows", "step": 7})
    await listener.close()


@in_loop
async def test_ready_names_what_changed_since_the_page_was_rendered(admin: Visitor, run: Run) -> None:
    await announce(run, "console", 3)
    now = int(1000 * time.time())
    listener = await listen(admin, f"runs/{run.id}/events?since={now - 60_000}")
    assert await listener.next() == ("ready", {"source": "push", "changed": ["console"]})
    await listener.close()
    other = await sync_to_async(make_run)(admin.project, "another")
    for rest, changed in (
        (f"events?since={now - 60_000}", ["console"]),
        (f"runs/{other.id}/events?since={now - 60_000}", []),
        (f"runs/{run.id}/events?since={now + 60_000}", []),
        (f"runs/{run.id}/events?since={now - 3_600_000}", None),
    ):
        listener = await listen(admin, rest)
        assert await listener.next() == ("ready", {"source": "push", "changed": changed}), rest
        await listener.close()


@in_loop
async def test_the_stream_of_a_project_contains_all_its_runs(admin: Visitor, run: Run) -> None:
    other = await sync_to_async(make_run)(admin.project, "another")
    listener = await listen(admin, "events")
    await listener.next()
    await announce(run, "state")
    await announce(other, "alert", 3)
    assert [(await listener.next())[1]["run"] for _ in range(2)] == [str(run.id), str(other.id)]
    await listener.close()


@in_loop
async def test_the_stream_of_a_run_contains_no_other_runs(admin: Visitor, run: Run) -> None:
    other = await sync_to_async(make_run)(admin.project, "another")
    listener = await listen(admin, f"runs/{run.id}/events")
    await listener.next()
    await announce(other, "rows", 1)
    await announce(run, "rows", 2)
    assert (await listener.next())[1]["step"] == 2
    await listener.close()


@in_loop
async def test_polls_the_database_while_redis_is_unavailable(
    admin: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    monkeypatch.setattr(event_stream, "POLL_SECONDS", 0.05)
    listener = await listen(admin, f"runs/{run.id}/events")
    assert await listener.next() == ("ready", {"source": "polling"})
    await Run.objects.filter(pk=run.pk).aupdate(state="finished")
    assert await listener.next() == ("change", {"kind": "state"})
    await Alert.objects.acreate(
        run=run, kind="loss_spike", severity="warning", onset_step=1, step=2, message="Up."
    )
    assert await listener.next() == ("change", {"kind": "alert"})
    await listener.close()


@in_loop
async def test_reconnects_to_redis(
    admin: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    redis_url = settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    monkeypatch.setattr(event_stream, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(event_stream, "RETRY_REDIS_SECONDS", 0.1)
    listener = await listen(admin, f"runs/{run.id}/events")
    assert (await listener.next())[1] == {"source": "polling"}
    settings.REDIS_URL = redis_url
    while (await listener.next())[1] != {"source": "push"}:
        pass
    await listener.close()


@in_loop
async def test_sends_heartbeats_on_an_idle_stream(
    admin: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(event_stream, "WAKE_SECONDS", 0.05)
    stream = event_stream.stream("nothing", dict, "s")
    received = b""
    async with asyncio.timeout(SECONDS):
        while b": heartbeat" not in received:
            received += await anext(stream)
    await stream.aclose()


@in_loop
async def test_a_stream_ends_after_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "LIFETIME_SECONDS", 0.1)
    monkeypatch.setattr(event_stream, "WAKE_SECONDS", 0.02)
    async with asyncio.timeout(SECONDS):
        assert [chunk async for chunk in event_stream.stream("nothing", dict, "s")]


@in_loop
async def test_a_stream_above_the_limit_ends_the_oldest_of_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_stream, "WAKE_SECONDS", 0.02)
    opened = [event_stream.stream("nothing", dict, "me") for _ in range(event_stream.MAX_PER_SESSION + 1)]
    other = event_stream.stream("nothing", dict, "somebody else")
    for stream in (other, *opened):
        await anext(stream)
    assert event_stream.registry.count == event_stream.MAX_PER_SESSION + 1
    async with asyncio.timeout(SECONDS):
        async for _ in opened[0]:
            pass
    for stream in (other, *opened):
        await stream.aclose()
    assert event_stream.registry.count == 0


@in_loop
async def test_a_full_process_answers_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_STREAMS", 0)
    assert [chunk async for chunk in event_stream.stream("nothing", dict, "s")] == [
        b"event: busy\ndata: {}\n\n"
    ]


@in_loop
async def test_a_disconnected_client_is_removed(admin: Visitor, run: Run) -> None:
    listener = await listen(admin, "events")
    await listener.next()
    assert event_stream.registry.count == 1
    waiting = asyncio.create_task(listener.next())
    await asyncio.sleep(0)
    # The server cancels a request if its client disconnects.
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert event_stream.registry.count == 0


def test_fingerprints_differ_after_each_kind_of_change(admin: Visitor, run: Run) -> None:
    runs = Run.objects.filter(pk=run.pk)
    before = fingerprint_of(runs)
    assert fingerprint_of(runs) == before
    Alert.objects.create(run=run, kind="loss_spike", severity="warning", onset_step=1, step=2, message="Up.")
    after = fingerprint_of(runs)
    assert [kind for kind in before if before[kind] != after[kind]] == ["alert"]
    StepNote.objects.create(run=run, step=1, text="Seen.")
    assert fingerprint_of(runs)["note"] != after["note"]
    Alert.objects.update(state="acknowledged")
    assert fingerprint_of(runs)["alert"] != after["alert"]
    Run.objects.update(state="failed")
    assert fingerprint_of(runs)["state"] != after["state"]


def test_a_fingerprint_needs_few_queries(
    admin: Visitor, run: Run, django_assert_max_num_queries: Any
) -> None:
    # One query for each table that the pages show, regardless of the number of runs.
    with django_assert_max_num_queries(15):
        fingerprint_of(Run.objects.filter(project=admin.project))
    assert connection.in_atomic_block is False
