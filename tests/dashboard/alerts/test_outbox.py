"""The outbox delivers every event to every channel at least once and retries failures."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.db import connection
from django.utils import timezone

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import outbox
from fp8scope_dashboard.alerts.channels import CHANNELS, ChannelType, DeliveryError, Message
from fp8scope_dashboard.alerts.models import Channel, Delivery
from fp8scope_dashboard.alerts.services import evaluate


class Inbox:
    """A channel that records its notices and raises `error`, if set."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.error: Exception | None = None

    def __call__(self, config: Mapping[str, Any], message: Message) -> None:
        self.messages.append(message)
        if self.error is not None:
            raise self.error


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Inbox:
    inbox = Inbox()
    channel_type = ChannelType("Inbox", inbox, masked=lambda config: "inbox")
    monkeypatch.setattr(outbox, "CHANNELS", {**CHANNELS, "inbox": channel_type})
    return inbox


@pytest.fixture
def delivery(transactional_db: None, inbox: Inbox) -> Delivery:
    project = create_project("default", "Default")
    Channel.objects.create(project=project, kind="inbox", name="here")
    Channel.objects.create(project=project, kind="inbox", name="off", enabled=False)
    run = make_run(project, "gpt")
    Recorder(run).rows(np.arange(20), {"loss": np.full(20, np.nan)})
    evaluate(run.id)
    return Delivery.objects.get()


def refreshed(delivery: Delivery) -> Delivery:
    delivery.refresh_from_db()
    return delivery


def test_it_works(delivery: Delivery, inbox: Inbox) -> None:
    assert outbox.due() == [delivery.pk]
    assert outbox.deliver(delivery.pk)
    ((notice,),) = [message.notices for message in inbox.messages]
    assert notice.kind == "loss_not_finite" and notice.run_name == "gpt" and notice.url.endswith("/")
    assert refreshed(delivery).delivered_at is not None and delivery.attempts == 1
    assert outbox.due() == []
    assert not outbox.deliver(delivery.pk) and len(inbox.messages) == 1


def test_evaluating_again_delivers_nothing_twice(delivery: Delivery) -> None:
    evaluate(delivery.event.run_id)
    assert Delivery.objects.count() == 1


def test_a_failure_is_tried_again_later(delivery: Delivery, inbox: Inbox) -> None:
    inbox.error = DeliveryError("The receiver answered 500.")
    assert not outbox.deliver(delivery.pk)
    assert refreshed(delivery).last_error == "The receiver answered 500."
    assert delivery.claimed_at is None and delivery.failed_at is None
    assert delivery.due_at > timezone.now() and outbox.due() == []
    assert not outbox.deliver(delivery.pk) and len(inbox.messages) == 1
    inbox.error = None
    Delivery.objects.update(due_at=timezone.now())
    assert outbox.deliver(delivery.pk)
    assert refreshed(delivery).attempts == 2 and delivery.last_error == ""


def test_pauses_grow_and_the_number_of_attempts_is_bounded(delivery: Delivery, inbox: Inbox) -> None:
    inbox.error = DeliveryError("No.")
    pauses = []
    for _ in range(outbox.MOST_ATTEMPTS):
        before = timezone.now()
        outbox.deliver(delivery.pk)
        pauses.append((refreshed(delivery).due_at - before).total_seconds())
        Delivery.objects.update(due_at=timezone.now())
    assert pauses == sorted(pauses) and pauses[-1] > 100 * pauses[0]
    assert refreshed(delivery).failed_at is not None and outbox.due() == []


def test_a_permanent_failure_is_not_retried(delivery: Delivery, inbox: Inbox) -> None:
    inbox.error = DeliveryError("Bad url.", permanent=True)
    outbox.deliver(delivery.pk)
    assert refreshed(delivery).failed_at is not None


def test_a_bug_in_a_channel_releases_the_claim_and_reveals_no_secret(
    delivery: Delivery, inbox: Inbox
) -> None:
    inbox.error = RuntimeError("the secret is hunter2")
    assert not outbox.deliver(delivery.pk)
    assert refreshed(delivery).claimed_at is None
    assert "RuntimeError" in delivery.last_error and "hunter2" not in delivery.last_error


def test_a_disabled_channel_gets_nothing(delivery: Delivery, inbox: Inbox) -> None:
    Channel.objects.update(enabled=False)
    assert not outbox.deliver(delivery.pk)
    assert inbox.messages == [] and refreshed(delivery).failed_at is not None


def test_the_claim_of_a_dead_worker_is_released(delivery: Delivery, inbox: Inbox) -> None:
    Delivery.objects.update(claimed_at=timezone.now())
    assert outbox.due() == [] and not outbox.deliver(delivery.pk)
    Delivery.objects.update(claimed_at=timezone.now() - outbox.CLAIM_EXPIRES - timedelta(seconds=1))
    assert outbox.due() == [delivery.pk]
    assert outbox.deliver(delivery.pk)


def test_only_one_of_many_workers_sends(delivery: Delivery, inbox: Inbox) -> None:
    barrier = threading.Barrier(8)
    sent = []

    def work() -> None:
        try:
            barrier.wait()
            sent.append(outbox.deliver(delivery.pk))
        finally:
            connection.close()

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(sent) == [False] * 7 + [True]
    assert len(inbox.messages) == 1
