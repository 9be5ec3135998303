"""A worker that is killed at any statement of delivering: every alert arrives, each with one key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from dashboard.helpers import crashing_delivery
from dashboard.helpers.messages import Receiver
from dashboard.helpers.recording import make_run
from django.conf import settings
from django.db import transaction
from django.db.models import F
from helpers.live_servers import process_environment

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db(transaction=True)
# More moments than delivering has; their number fits into an exit status.
MAX_MOMENTS = 200


@pytest.fixture
def run(receiver: Receiver) -> Run:
    project = create_project("default", "Default")
    sealed = encrypt_json({"url": receiver.url, "secret": "s"})
    Channel.objects.create(project=project, name="hook", sealed=sealed, per_minute=600)
    return make_run(project, "gpt")


def open_events(run: Run, count: int, channels: Sequence[Channel] | None = None) -> list[Alert]:
    first = Alert.objects.count()
    with transaction.atomic():
        fields = {"kind": "loss_spike", "severity": "critical", "message": "Up."}
        events = [
            Alert.objects.create(run=run, onset_step=first + i, step=1000, **fields) for i in range(count)
        ]
        for event in events:
            outbox.enqueue(event, channels)
    return events


Work = Callable[[Mapping[int, int]], dict[int, str]]
"""Lets a worker deliver each delivery until the given moment; returns what became of it."""


@pytest.fixture(scope="module")
def work(django_db_setup: None) -> Iterator[Work]:
    process = subprocess.Popen(
        [sys.executable, str(Path(crashing_delivery.__file__))],
        env={**process_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def work(moments: Mapping[int, int]) -> dict[int, str]:
        stdin.write(f"{json.dumps(moments)}\n")
        stdin.flush()
        return {int(delivery): outcome for delivery, outcome in json.loads(stdout.readline()).items()}

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


def keys_received(receiver: Receiver) -> list[tuple[str, list[str]]]:
    """The key of each request, and the keys of its alerts."""
    received = []
    for _, headers, body in receiver.requests:
        content = json.loads(body)
        alerts = [alert["key"] for alert in content.get("alerts", [content])]
        received.append((headers["Idempotency-Key"], alerts))
    return received


def digest(run: Run, receiver: Receiver, members: int) -> Delivery:
    """A delivery of a channel of its own; with more `members` it is a digest."""
    sealed = encrypt_json({"url": receiver.url})
    channel = Channel.objects.create(project=run.project, name="hook", sealed=sealed, per_minute=600)
    open_events(run, members, [channel])
    Delivery.objects.filter(channel=channel).update(held=members > 1)
    return Delivery.objects.filter(channel=channel).earliest("pk")


# The moment after a statement is that before the next one.
@pytest.mark.parametrize(("members", "stride"), [(1, 2), (3, 4)])
def test_it_works(run: Run, receiver: Receiver, work: Work, members: int, stride: int) -> None:
    """Workers die at every moment; with more `members` they deliver digests."""
    uninterrupted = digest(run, receiver, members)
    outcome = work({uninterrupted.pk: MAX_MOMENTS})[uninterrupted.pk]
    last = int(outcome.removeprefix("done "))
    # There were statements, commits and the request itself to die at.
    assert last > 20
    moments = {digest(run, receiver, members).pk: moment for moment in range(1, last + 1, stride)}
    assert set(work(moments).values()) == {"killed"}
    # Nobody else sends what a worker claimed while it could still be alive.
    claimed = list(Delivery.objects.filter(claimed_at__isnull=False).values_list("pk", flat=True))
    assert claimed and not any(outbox.deliver(pk) for pk in claimed)
    claims_expire()
    deliver_due()
    assert not Delivery.objects.filter(delivered_at=None).exists()
    received = keys_received(receiver)
    for delivery in Delivery.objects.filter(pk__in=[uninterrupted.pk, *moments]):
        alerts = [sorted(each) for key, each in received if key == str(delivery.key)]
        keys = Delivery.objects.filter(channel=delivery.channel_id).values_list("key", flat=True)
        # Once or twice, and both times the same.
        assert alerts in ([sorted(map(str, keys))], [sorted(map(str, keys))] * 2)
    # A digest has the key of its leader; its followers are not sent by themselves.
    assert len({key for key, _ in received}) == 1 + len(moments)


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
    assert [key for key, _ in keys_received(receiver)] == [str(Delivery.objects.get().key)] * 3
    assert Delivery.objects.get().delivered_at is not None and Delivery.objects.get().attempts == 3
    deliver_due()
    assert len(receiver.requests) == 3
