"""The runs that wait are evaluated together, urgent ones first, and what they report is sent at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import redis
from dashboard.helpers.messages import Receiver
from dashboard.helpers.recording import Recorder, make_run
from django.conf import settings
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from helpers.waiting import wait_until

from fp8scope_dashboard import notifications
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.detection import evaluator
from fp8scope_dashboard.alerts.models import RUN_WIDE, Alert, Channel, Delivery, DetectorState
from fp8scope_dashboard.alerts.services import unread_runs
from fp8scope_dashboard.alerts.tasks import sweep
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.models import Chunk

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.flushdb()
        yield client
        client.flushdb()


def faulty_runs(project: Project, count: int) -> list[Run]:
    """Runs whose loss becomes NaN at step 20."""
    loss = np.where(np.arange(30) < 20, 2.0, np.nan)
    runs = [make_run(project, f"run {i}") for i in range(count)]
    for run in runs:
        Recorder(run=run).rows(np.arange(30), {"loss": loss}, rows_per_batch=10)
    assert notifications.flush()
    return runs


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Another worker evaluates the run within the context."""
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            DetectorState.objects.select_for_update().get(run=run, writer=RUN_WIDE)
            locked.set()
            done.wait(60.0)
        connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(60.0)
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_it_works(project: Project, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn evaluates every run that waits, and its mark is gone afterwards."""
    # On a busy machine the two rounds take longer than a turn.
    monkeypatch.setattr(evaluator, "TURN_SECONDS", 300.0)
    runs = faulty_runs(project, evaluator.RUNS_AT_ONCE + 5)
    assert client.zcard(notifications.WAITING_RUNS) == len(runs)
    assert evaluator.work(0) == len(runs)
    assert set(Alert.objects.values_list("run", flat=True)) == {run.pk for run in runs}
    assert unread_runs() == []
    assert client.zcard(notifications.WAITING_RUNS) == 0
    assert client.get(notifications.evaluator_key(0)) is None


def test_takes_urgent_runs_first_and_only_once(client: redis.Redis) -> None:
    first, second, urgent = (UUID(int=number) for number in range(3))
    notifications.enqueue_evaluations(client, [first])
    notifications.enqueue_evaluations(client, [second, urgent])
    client.zadd(notifications.URGENT_RUNS, {str(urgent): time.time()})
    assert evaluator.take(client, 10.0) == ([urgent], True)
    assert evaluator.take(client, 0.0) == ([first, second], False)
    # While others rest, only urgent runs are taken.
    notifications.enqueue_evaluations(client, [first])
    assert evaluator.take(client, 0.01) == ([], False)


def test_others_come_after_urgent_runs_when_they_have_waited(client: redis.Redis) -> None:
    """Otherwise a rule that is not urgent is not judged as long as other runs fail."""
    waiting, new, urgent = (UUID(int=number) for number in range(3))
    client.zadd(notifications.WAITING_RUNS, {str(waiting): time.time() - 2 * evaluator.OVERDUE_SECONDS})
    client.zadd(notifications.URGENT_RUNS, {str(waiting): time.time()})
    client.zadd(notifications.URGENT_RUNS, {str(urgent): time.time()})
    assert evaluator.take(client, 10.0, prefers_overdue=True) == ([waiting], False)
    client.zadd(notifications.WAITING_RUNS, {str(new): time.time()})
    assert evaluator.take(client, 10.0, prefers_overdue=True) == ([urgent], True)


def test_leaves_a_run_to_the_worker_that_evaluates_it(project: Project, client: redis.Redis) -> None:
    """It would wait for that one's transaction, and with it all runs that it has taken."""
    busy, free = faulty_runs(project, 2)
    evaluator.evaluate_all([busy.pk, free.pk])
    for run in (busy, free):
        Recorder(run=run, rank=1).rows(np.arange(30), {"loss": np.full(30, 2.0)})
    with held(busy):
        assert evaluator.evaluate_all([busy.pk, free.pk]) == [busy.pk]
    assert unread_runs() == [busy.pk]
    assert evaluator.evaluate_all([busy.pk]) == []


def test_an_urgent_run_that_another_worker_evaluates_stays_urgent(
    project: Project, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may have begun before the rows arrived that make it urgent."""
    (run,) = faulty_runs(project, 1)
    evaluator.evaluate_all([run.pk])
    Recorder(run=run, rank=1).rows(np.arange(30), {"loss": np.full(30, 2.0)})
    assert notifications.flush()
    client.delete(notifications.WAITING_RUNS)
    client.zadd(notifications.URGENT_RUNS, {str(run.pk): time.time()})
    take, looks = evaluator.take, [True, False]

    def take_once(*arguments: Any, **options: Any) -> Any:
        return take(*arguments, **options) if looks.pop(0) else ([], False)

    monkeypatch.setattr(evaluator, "take", take_once)
    with held(run):
        evaluator.work(0)
    assert client.zrange(notifications.URGENT_RUNS, 0, -1) == [str(run.pk).encode()]


def test_opening_an_alert_takes_few_queries(
    project: Project, client: redis.Redis, receiver: Receiver
) -> None:
    """A burst of alerts is as slow as its queries are many."""
    Channel.objects.create(project=project, name="hook", sealed=encrypt_json({"url": receiver.url}))
    # The first evaluation reads the project's rules.
    evaluator.evaluate_all([make_run(project).pk])
    counts = []
    for number in (2, 6):
        runs = faulty_runs(project, number)
        with CaptureQueriesContext(connection) as queries:
            evaluator.evaluate_all([run.pk for run in runs])
        counts.append(len(queries))
    assert Alert.objects.count() == 8
    # Its run's events, twice; itself; its history; the rule's and the project's channels; the delivery.
    assert (counts[1] - counts[0]) / 4 == 7


def test_the_number_of_queries_does_not_grow_with_the_runs(project: Project, client: redis.Redis) -> None:
    evaluator.evaluate_all([make_run(project).pk])
    counts = []
    for number in (2, 12):
        runs = [make_run(project) for _ in range(number)]
        for run in runs:
            Recorder(run=run).rows(np.arange(20), {"loss": np.full(20, 2.0)})
        with CaptureQueriesContext(connection) as queries:
            evaluator.evaluate_all([run.pk for run in runs])
        counts.append(len(queries))
    assert counts[0] == counts[1]
    assert unread_runs() == []


def test_a_run_that_cannot_be_evaluated_holds_up_no_other(
    project: Project, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    runs = faulty_runs(project, 3)
    Chunk.objects.filter(run=runs[1]).update(body=b"damaged")
    evaluator.work(0)
    assert set(Alert.objects.values_list("run", flat=True)) == {runs[0].pk, runs[2].pk}
    assert f"Run {runs[1].pk} could not be evaluated." in caplog.messages


def test_sends_at_once_without_another_task(
    project: Project, client: redis.Redis, receiver: Receiver
) -> None:
    Channel.objects.create(project=project, name="hook", sealed=encrypt_json({"url": receiver.url}))
    faulty_runs(project, 1)
    evaluator.work(0)
    wait_until(lambda: Delivery.objects.exclude(delivered_at=None).exists(), "the delivery")
    assert len(receiver.requests) == 1
    assert client.llen("deliveries") == 0


def test_sends_by_a_task_while_too_many_are_being_sent(
    project: Project, client: redis.Redis, receiver: Receiver
) -> None:
    """A receiver that hangs holds up no evaluation, and no delivery to others."""
    receiver.hang = threading.Event()
    for number in range(outbox.MAX_AT_ONCE + 2):
        sealed = encrypt_json({"url": receiver.url})
        Channel.objects.create(project=project, name=f"hook {number}", sealed=sealed)
    faulty_runs(project, 1)
    evaluator.work(0)
    assert client.llen("deliveries") == 2
    wait_until(lambda: len(receiver.requests) == outbox.MAX_AT_ONCE, "sending")
    assert Alert.objects.exists() and len(outbox.due()) == 2


def test_a_sweep_finds_runs_that_redis_has_lost(project: Project, client: redis.Redis) -> None:
    (run,) = faulty_runs(project, 1)
    client.flushdb()
    assert evaluator.work(0) == 0
    sweep()
    assert evaluator.work(0) == 1
    assert Alert.objects.filter(run=run).exists()


def test_an_evaluator_ends_when_another_has_its_slot(project: Project, client: redis.Redis) -> None:
    """A task that waited for longer than its mark lasted was replaced; two would stay for ever."""
    key = notifications.evaluator_key(0)

    def take_over(execute: Any, *arguments: Any) -> Any:
        client.set(key, "another", ex=60)
        return execute(*arguments)

    faulty_runs(project, 1)
    with connection.execute_wrapper(take_over):
        assert evaluator.work(0) == 1
    assert client.get(key) == b"another"
