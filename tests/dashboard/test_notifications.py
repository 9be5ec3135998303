"""Changes are announced on Redis and start jobs, after the commit and only then."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import transaction

from fp8scope_dashboard import notifications
from fp8scope_dashboard.notifications import Courier

pytestmark = pytest.mark.django_db(transaction=True)
RUN = uuid.UUID(int=7)


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.flushdb()
        yield client
        client.flushdb()


@pytest.fixture
def listener(client: redis.Redis) -> Iterator[Any]:
    with client.pubsub(ignore_subscribe_messages=True) as listener:  # type: ignore[no-untyped-call]
        listener.subscribe(notifications.run_channel(RUN), notifications.project_channel(3))
        # The subscriptions' acknowledgements.
        for _ in range(2):
            listener.get_message(timeout=5)
        yield listener


def heard(listener: Any) -> list[tuple[str, Any]]:
    assert notifications.flush()
    found = []
    while message := listener.get_message(timeout=0.2):
        found.append((message["channel"].decode(), json.loads(message["data"])))
    return found


def jobs(client: redis.Redis) -> list[str]:
    """The names of the tasks in Celery's queue."""
    assert notifications.flush()
    return [json.loads(message)["headers"]["task"] for message in client.lrange("celery", 0, -1)]


def test_it_works(client: redis.Redis, listener: Any) -> None:
    notifications.run_changed(RUN, 3, "rows", 12)
    message = {"run": str(RUN), "kind": "rows", "step": 12}
    assert heard(listener) == [(f"fp8scope:run:{RUN}", message), ("fp8scope:project:3", message)]
    assert sorted(jobs(client)) == [notifications.EVALUATE_RUN, notifications.COMPARE_RUN]


def test_nothing_is_said_of_what_was_rolled_back(client: redis.Redis, listener: Any) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        notifications.run_changed(RUN, 3, "rows", 1)
        raise ZeroDivisionError
    with transaction.atomic():
        notifications.run_changed(RUN, 3, "alert", 2)
        assert heard(listener) == []
    assert [message["kind"] for _, message in heard(listener)] == ["alert", "alert"]
    assert jobs(client) == []


def test_many_changes_start_few_jobs(client: redis.Redis) -> None:
    for step in range(50):
        notifications.run_changed(RUN, 3, "rows", step)
        notifications.flush()
    assert 2 <= len(jobs(client)) <= 20
    assert (
        client.pttl(f"fp8scope:due:{notifications.EVALUATE_RUN}:{RUN}") <= notifications.JOB_MARK_MILLISECONDS
    )


def test_a_change_while_a_job_is_due_is_seen_by_it() -> None:
    # The mark goes before the job starts: a change that finds the mark is committed before the job reads.
    assert notifications.JOB_MARK_MILLISECONDS < notifications.JOB_DELAY_SECONDS * 1000


def test_jobs_that_events_name_exist() -> None:
    from celery import current_app

    current_app.loader.import_default_modules()
    for names in notifications.JOBS.values():
        for name in names:
            assert name in current_app.tasks


def test_redis_is_away(caplog: pytest.LogCaptureFixture) -> None:
    courier = Courier("unix:///nonexistent/redis.sock")
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            courier.leave(RUN, 3, "rows", step)
            assert courier.flush(10)
    assert [record.message for record in caplog.records] == [
        "Redis is away (ConnectionError): pages and jobs catch up later."
    ]


def test_notes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "NOTES_KEPT", 3)
    monkeypatch.setattr(Courier, "_work", lambda self: None)
    courier = Courier("unix:///nonexistent/redis.sock")
    for number in range(10):
        courier.leave(uuid.UUID(int=number), 3, "rows", 1)
        courier.leave(uuid.UUID(int=0), 3, "rows", number)
    assert len(courier._notes) == 3
    assert courier._notes[uuid.UUID(int=0), 3, "rows"] == 9
