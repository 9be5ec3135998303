"""Changes are announced on Redis and start jobs, only after the commit."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import current_app
from celery.signals import task_prerun
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
    messages = [message for queue in ("evaluations", "celery") for message in client.lrange(queue, 0, -1)]
    return [json.loads(message)["headers"]["task"] for message in messages]


def waiting(client: redis.Redis) -> set[uuid.UUID]:
    """The runs that wait for the detectors."""
    assert notifications.flush()
    runs: Any = client.zrange(notifications.WAITING_RUNS, 0, -1)
    return {uuid.UUID(run.decode()) for run in runs}


def test_it_works(client: redis.Redis, listener: Any) -> None:
    notifications.run_changed(RUN, 3, "rows", 12)
    message = {"run": str(RUN), "kind": "rows", "step": 12}
    assert received(listener) == [(f"fp8scope:run:{RUN}", message), ("fp8scope:project:3", message)]
    assert sorted(queued_jobs(client)) == [notifications.EVALUATE_WAITING, notifications.COMPARE_WAITING]
    assert waiting(client) == {RUN}


def test_publishes_nothing_before_the_commit_or_after_a_rollback(client: redis.Redis, listener: Any) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        notifications.run_changed(RUN, 3, "rows", 1)
        raise ZeroDivisionError
    with transaction.atomic():
        notifications.run_changed(RUN, 3, "alert", 2)
        assert received(listener) == []
    assert [message["kind"] for _, message in received(listener)] == ["alert", "alert"]
    assert queued_jobs(client) == [] and waiting(client) == set()


def test_of_many_changes_one_task_waits(client: redis.Redis) -> None:
    """However long the workers need: a queue must not grow with the time that they are late."""
    for step in range(50):
        notifications.run_changed(RUN, 3, "rows", step)
        notifications.run_changed(uuid.UUID(int=step % 5), 3, "rows", step)
        notifications.flush()
    assert sorted(queued_jobs(client)) == [notifications.EVALUATE_WAITING, notifications.COMPARE_WAITING]
    assert waiting(client) == {RUN, *(uuid.UUID(int=number) for number in range(5))}
    # Should the task be lost, another one can start some time later.
    for key in (notifications.evaluator_key(0), notifications.waiting_key(notifications.COMPARE_WAITING)):
        assert 0 < client.ttl(key) <= notifications.JOB_MARK_SECONDS


def test_more_runs_get_more_evaluators(client: redis.Redis) -> None:
    for number in range(3 * notifications.RUNS_PER_EVALUATOR):
        notifications.run_changed(uuid.UUID(int=number), 3, "rows", 1)
    assert queued_jobs(client).count(notifications.EVALUATE_WAITING) == 3
    slots = [json.loads(message)["headers"]["argsrepr"] for message in client.lrange("evaluations", 0, -1)]
    assert sorted(slots) == ["[0]", "[1]", "[2]"]


def test_an_evaluation_starts_at_once_and_a_comparison_a_moment_later(client: redis.Redis) -> None:
    notifications.run_changed(RUN, 3, "rows", 1)
    assert notifications.flush()
    (evaluation,) = (json.loads(message)["headers"] for message in client.lrange("evaluations", 0, -1))
    (comparison,) = (json.loads(message)["headers"] for message in client.lrange("celery", 0, -1))
    assert evaluation["eta"] is None and comparison["eta"] is not None


def test_an_urgent_change_stays_urgent(client: redis.Redis) -> None:
    with transaction.atomic():
        notifications.run_changed(RUN, 3, "rows", 1, urgent=True)
        notifications.run_changed(RUN, 3, "rows", 2)
    assert notifications.flush()
    assert client.zrange(notifications.URGENT_RUNS, 0, -1) == [str(RUN).encode()]


def test_a_change_after_the_start_of_a_job_starts_another(client: redis.Redis) -> None:
    current_app.loader.import_default_modules()
    job = notifications.DIAGNOSE_RUN
    for times in (1, 2):
        for _ in range(3):
            notifications.run_changed(RUN, 3, "diagnosis")
            assert queued_jobs(client).count(job) == times
        task_prerun.send(current_app.tasks[job], task=current_app.tasks[job], args=[str(RUN)])


def test_every_named_job_is_a_task() -> None:
    current_app.loader.import_default_modules()
    for name in {
        notifications.EVALUATE_WAITING,
        notifications.COMPARE_WAITING,
        *notifications.RUN_JOBS,
    }:
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
