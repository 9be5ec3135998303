"""A worker that is killed at any statement of delivering: every alert arrives, each with one key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from dashboard.helpers import crashing_delivery
from dashboard.helpers.messages import Receiver, http_receiver
from dashboard.helpers.recording import make_run
from django.conf import settings
from django.db import transaction
from django.db.models import F
from helpers.live_servers import process_environment

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.models import Channel, Delivery, Event
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db(transaction=True)
# More moments than delivering has.
MOST_MOMENTS = 100


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def run(receiver: Receiver) -> Run:
    project = create_project("default", "Default")
    sealed = encrypt_json({"url": receiver.url, "secret": "s"})
    Channel.objects.create(project=project, name="hook", sealed=sealed, per_minute=600)
    return make_run(project, "gpt")


def open_events(run: Run, count: int) -> list[Event]:
    first = Event.objects.count()
    with transaction.atomic():
        fields = {"kind": "loss_spike", "severity": "critical", "message": "Up."}
        events = [
            Event.objects.create(run=run, onset_step=first + i, step=1000, **fields) for i in range(count)
        ]
        for event in events:
            outbox.enqueue(event)
    return events


@contextmanager
def dying_workers(delivery: Delivery) -> Iterator[Callable[[int], str]]:
    """A function that lets a worker deliver until the given moment."""
    process = subprocess.Popen(
        [sys.executable, str(Path(crashing_delivery.__file__)), str(delivery.pk)],
        env={**process_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def work(moments: int) -> str:
        stdin.write(f"{moments}\n")
        stdin.flush()
        return stdout.readline().strip()

    yield work
    stdin.close()
    assert process.wait(30) == 0


def claims_expire() -> None:
    """Let the time pass that a dead worker's claim lasts, and a minute of the channel's limit."""
    past = outbox.CLAIM_EXPIRES + timedelta(seconds=1)
    Delivery.objects.update(claimed_at=F("claimed_at") - past, due_at=F("due_at") - past)
    Channel.objects.update(minute_started_at=F("minute_started_at") - past)


def deliver_due() -> None:
    for pk in outbox.due():
        outbox.deliver(pk)


def keys_received(receiver: Receiver, path: str) -> list[tuple[str, list[str]]]:
    """The key of each request to a path, and the keys of its alerts."""
    received = []
    for requested, headers, body in receiver.requests:
        if requested == path:
            content = json.loads(body)
            alerts = [alert["key"] for alert in content.get("alerts", [content])]
            received.append((headers["Idempotency-Key"], alerts))
    return received


# The moment after a statement is that before the next one.
@pytest.mark.parametrize(("members", "stride"), [(1, 2), (3, 6)])
def test_it_works(run: Run, receiver: Receiver, members: int, stride: int) -> None:
    """A worker dies at every moment in turn; with more `members` it delivers a digest."""
    (delivery,) = open_events(run, 1)[0].deliveries.all()
    with dying_workers(delivery) as work:
        for moment in range(1, MOST_MOMENTS, stride):
            # Requests of the moment before may still be on their way.
            path = f"/hook/{moment}"
            Channel.objects.update(sealed=encrypt_json({"url": receiver.url.replace("/hook", path)}))
            Delivery.objects.exclude(pk=delivery.pk).delete()
            open_events(run, members - 1)
            Delivery.objects.update(attempts=0, delivered_at=None, leader=None, held=members > 1)
            outcome = work(moment)
            # Nobody else sends it while the worker could still be alive.
            claimed = Delivery.objects.filter(claimed_at__isnull=False).exists()
            assert not (claimed and outbox.deliver(delivery.pk))
            claims_expire()
            deliver_due()
            assert not Delivery.objects.filter(delivered_at=None).exists()
            received = keys_received(receiver, path)
            assert {key for key, _ in received} == {str(delivery.key)} and len(received) <= 2
            expected = sorted(str(key) for key in Delivery.objects.values_list("key", flat=True))
            assert all(sorted(alerts) == expected for _, alerts in received) and len(expected) == members
            if outcome == "done 0":
                break
            assert outcome == "killed"
    # There were statements, commits and the request itself to die at.
    assert moment > 20


def test_nothing_is_lost_when_redis_is_flushed(run: Run, receiver: Receiver) -> None:
    open_events(run, 5)
    redis.Redis.from_url(settings.REDIS_URL).flushdb()
    deliver_due()
    assert len(receiver.requests) == 5
    assert not Delivery.objects.filter(delivered_at=None).exists()


def test_a_receiver_that_fails_twice_gets_the_alert_with_one_key(run: Run, receiver: Receiver) -> None:
    receiver.statuses = [500, 503]
    open_events(run, 1)
    for _ in range(3):
        deliver_due()
        # The pauses between attempts are 10 and 20 s.
        claims_expire()
    assert [key for key, _ in keys_received(receiver, "/hook")] == [str(Delivery.objects.get().key)] * 3
    assert Delivery.objects.get().delivered_at is not None and Delivery.objects.get().attempts == 3
    deliver_due()
    assert len(receiver.requests) == 3
