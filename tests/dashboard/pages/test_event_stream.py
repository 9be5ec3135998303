"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
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

from fp8scope_dashboard.alerts.models import Event
from fp8scope_dashboard.notifications import flush, run_changed
from fp8scope_dashboard.pages import event_stream
from fp8scope_dashboard.pages.views.events import fingerprint_of
from fp8scope_dashboard.runs.models import Run

P = ParamSpec("P")

pytestmark = pytest.mark.django_db(transaction=True)
SECONDS = 20


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test. Its database work happens in this thread, on the connection of the fixtures."""

    @wraps(test)
    def run_it(*args: P.args, **kwargs: P.kwargs) -> None:
        async_to_sync(test)(*args, **kwargs)

    return run_it


class Listener:
    """Reads a stream as a browser does."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    async def next(self) -> tuple[str, Any]:
        """The next event's name and data; comments and settings are passed over."""
        async with asyncio.timeout(SECONDS):
            async for piece in self._pieces:
                fields = dict(line.split(": ", 1) for line in piece.decode().splitlines() if ": " in line)
                if "event" in fields:
                    return fields["event"], json.loads(fields["data"])
        raise AssertionError("The stream has ended.")

    async def close(self) -> None:
        await self._pieces.aclose()  # type: ignore[attr-defined]


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
async def test_a_projects_stream_has_all_its_runs(admin: Visitor, run: Run) -> None:
    other = await sync_to_async(make_run)(admin.project, "another")
    listener = await listen(admin, "events")
    await listener.next()
    await announce(run, "state")
    await announce(other, "alert", 3)
    assert [(await listener.next())[1]["run"] for _ in range(2)] == [str(run.id), str(other.id)]
    await listener.close()


@in_loop
async def test_a_runs_stream_has_nothing_of_others(admin: Visitor, run: Run) -> None:
    other = await sync_to_async(make_run)(admin.project, "another")
    listener = await listen(admin, f"runs/{run.id}/events")
    await listener.next()
    await announce(other, "rows", 1)
    await announce(run, "rows", 2)
    assert (await listener.next())[1]["step"] == 2
    await listener.close()


@in_loop
async def test_without_redis_the_database_is_asked(
    admin: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    monkeypatch.setattr(event_stream, "POLL_SECONDS", 0.05)
    listener = await listen(admin, f"runs/{run.id}/events")
    assert await listener.next() == ("ready", {"source": "polling"})
    await Run.objects.filter(pk=run.pk).aupdate(state="finished")
    assert await listener.next() == ("change", {"kind": "state"})
    await Event.objects.acreate(
        run=run, kind="loss_spike", severity="warning", onset_step=1, step=2, message="Up."
    )
    assert await listener.next() == ("change", {"kind": "alert"})
    await listener.close()


@in_loop
async def test_redis_is_tried_again(
    admin: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    there = settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    monkeypatch.setattr(event_stream, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(event_stream, "RETRY_REDIS_SECONDS", 0.1)
    listener = await listen(admin, f"runs/{run.id}/events")
    assert (await listener.next())[1] == {"source": "polling"}
    settings.REDIS_URL = there
    while (await listener.next())[1] != {"source": "push"}:
        pass
    await listener.close()


@in_loop
async def test_a_quiet_stream_is_kept_open(admin: Visitor, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(event_stream, "WAKE_SECONDS", 0.05)
    pieces = event_stream.stream("nothing", dict, "s")
    found = b""
    async with asyncio.timeout(SECONDS):
        while b": heartbeat" not in found:
            found += await anext(pieces)
    await pieces.aclose()


@in_loop
async def test_a_stream_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "LIFETIME_SECONDS", 0.1)
    monkeypatch.setattr(event_stream, "WAKE_SECONDS", 0.02)
    async with asyncio.timeout(SECONDS):
        assert [piece async for piece in event_stream.stream("nothing", dict, "s")]


@in_loop
async def test_one_tab_too_many_ends_the_sessions_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "WAKE_SECONDS", 0.02)
    opened = [event_stream.stream("nothing", dict, "me") for _ in range(event_stream.MOST_PER_SESSION + 1)]
    other = event_stream.stream("nothing", dict, "somebody else")
    for pieces in (other, *opened):
        await anext(pieces)
    assert event_stream.registry.count == event_stream.MOST_PER_SESSION + 1
    async with asyncio.timeout(SECONDS):
        async for _ in opened[0]:
            pass
    for pieces in (other, *opened):
        await pieces.aclose()
    assert event_stream.registry.count == 0


@in_loop
async def test_a_full_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MOST_STREAMS", 0)
    assert [piece async for piece in event_stream.stream("nothing", dict, "s")] == [
        b"event: busy\ndata: {}\n\n"
    ]


@in_loop
async def test_the_client_leaves(admin: Visitor, run: Run) -> None:
    listener = await listen(admin, "events")
    await listener.next()
    assert event_stream.registry.count == 1
    waiting = asyncio.create_task(listener.next())
    await asyncio.sleep(0)
    # What the server does to a request whose client is gone.
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert event_stream.registry.count == 0


def test_fingerprints_differ_after_each_kind_of_change(admin: Visitor, run: Run) -> None:
    runs = Run.objects.filter(pk=run.pk)
    before = fingerprint_of(runs)
    assert fingerprint_of(runs) == before
    Event.objects.create(run=run, kind="loss_spike", severity="warning", onset_step=1, step=2, message="Up.")
    after = fingerprint_of(runs)
    assert [kind for kind in before if before[kind] != after[kind]] == ["alert"]
    Event.objects.update(state="acknowledged")
    assert fingerprint_of(runs)["alert"] != after["alert"]
    Run.objects.update(state="failed")
    assert fingerprint_of(runs)["state"] != after["state"]


def test_a_fingerprint_asks_few_questions(
    admin: Visitor, run: Run, django_assert_max_num_queries: Any
) -> None:
    # One for each table that something on a page comes from, whatever the number of runs.
    with django_assert_max_num_queries(11):
        fingerprint_of(Run.objects.filter(project=admin.project))
    assert connection.in_atomic_block is False
