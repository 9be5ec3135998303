"""Changes are announced on Redis and start jobs, only after the commit."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import current_app
from django.conf import settings
from django.db import transaction

from fp8scope_dashboard import notifications
from fp8scope_dashboard.notifications import Publisher

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
        # The acknowledgements of the two subscriptions.
        for _ in range(2):
            listener.get_message(timeout=5)
        yield listener


def received(listener: Any) -> list[tuple[str, Any]]:
    """The channel and content of every message that has arrived."""
    assert notifications.flush()
    messages = []
    while message := listener.get_message(timeout=0.2):
        messages.append((message["channel"].decode(), json.loads(message["data"])))
    return messages


def queued_jobs(client: redis.Redis) -> list[str]:
    """The names of the tasks in the queues of Celery."""
    assert notifications.flush()
    messages = [message for queue in ("alerts", "celery") for message in client.lrange(queue, 0, -1)]
    return [json.loads(message)["headers"]["task"] for message in messages]


def test_it_works(client: redis.Redis, listener: Any) -> None:
    notifications.run_changed(RUN, 3, "rows", 12)
    message = {"run": str(RUN), "kind": "rows", "step": 12}
    assert received(listener) == [(f"fp8scope:run:{RUN}", message), ("fp8scope:project:3", message)]
    assert sorted(queued_jobs(client)) == [notifications.EVALUATE_RUN, notifications.COMPARE_RUN]


def test_publishes_nothing_before_the_commit_or_after_a_rollback(client: redis.Redis, listener: Any) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        notifications.run_changed(RUN, 3, "rows", 1)
        raise ZeroDivisionError
    with transaction.atomic():
        notifications.run_changed(RUN, 3, "alert", 2)
        assert received(listener) == []
    assert [message["kind"] for _, message in received(listener)] == ["alert", "alert"]
    assert queued_jobs(client) == []


def test_many_changes_start_few_jobs(client: redis.Redis) -> None:
    for step in range(50):
        notifications.run_changed(RUN, 3, "rows", step)
        notifications.flush()
    assert 2 <= len(queued_jobs(client)) <= 20
    for name, longest in (
        (notifications.EVALUATE_RUN, notifications.PROMPT_SPACING_MILLISECONDS),
        (notifications.COMPARE_RUN, notifications.JOB_MARK_MILLISECONDS),
    ):
        assert client.pttl(f"fp8scope:due:{name}:{RUN}") <= longest


def start_times(client: redis.Redis) -> list[datetime | None]:
    """When the queued evaluations may start; None for at once."""
    assert notifications.flush()
    headers = [json.loads(message)["headers"] for message in client.lrange("alerts", 0, -1)]
    assert {header["task"] for header in headers} == {notifications.EVALUATE_RUN}
    return [datetime.fromisoformat(header["eta"]) if header["eta"] else None for header in reversed(headers)]


def test_the_first_change_is_evaluated_at_once_and_later_ones_soon(client: redis.Redis) -> None:
    begun = datetime.now(UTC)
    notifications.run_changed(RUN, 3, "rows", 1)
    assert start_times(client) == [None]
    for step in range(2, 5):
        notifications.run_changed(RUN, 3, "rows", step)
        assert notifications.flush()
    first, second = start_times(client)
    assert first is None and second is not None
    # The mark that suppressed the last changes expires before the job starts that serves them.
    before = datetime.now(UTC)
    both = client.pipeline()
    for key in ("due", "recent"):
        both.pttl(f"fp8scope:{key}:{notifications.EVALUATE_RUN}:{RUN}")
    due, recent = both.execute()
    assert before + timedelta(milliseconds=due) < second
    spacing = timedelta(milliseconds=notifications.PROMPT_SPACING_MILLISECONDS)
    slack = timedelta(milliseconds=notifications.PROMPT_SLACK_MILLISECONDS)
    assert begun < second < datetime.now(UTC) + spacing + slack
    # The job after that is further away.
    assert recent > due


def test_the_mark_of_a_job_expires_before_the_job_reads() -> None:
    # So a change that is suppressed by the mark is committed before the job reads.
    assert notifications.JOB_MARK_MILLISECONDS < notifications.JOB_DELAY_SECONDS * 1000


def test_every_named_job_is_a_task() -> None:
    current_app.loader.import_default_modules()
    for names in notifications.JOBS.values():
        for name in names:
            assert name in current_app.tasks


def test_an_outage_of_redis_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher("unix:///nonexistent/redis.sock")
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            publisher.put(RUN, 3, "rows", step)
            assert publisher.flush(10)
    assert [record.message for record in caplog.records] == [
        "Redis is unavailable (ConnectionError): pages and jobs catch up later."
    ]


def test_waiting_changes_are_bounded() -> None:
    publisher = Publisher("unix:///nonexistent/redis.sock", max_waiting=3, start=False)
    for number in range(10):
        publisher.put(uuid.UUID(int=number), 3, "rows", 1)
        publisher.put(uuid.UUID(int=0), 3, "rows", number)
    assert len(publisher.waiting) == 3
    assert publisher.waiting[uuid.UUID(int=0), 3, "rows"] == 9
