"""The outbox delivers every event to every channel at least once and retries failures."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.conf import LazySettings
from django.db import connection
from django.db.models import F
from django.utils import timezone

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.channels import CHANNELS, ChannelMessage, ChannelType, DeliveryError
from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.lifecycle import resolve
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery, Reason
from fp8scope_dashboard.alerts.services import evaluate


class Inbox:
    """A channel that records its notices and raises `error`, if set."""

    def __init__(self) -> None:
        self.messages: list[ChannelMessage] = []
        self.error: Exception | None = None

    def __call__(self, config: Mapping[str, Any], message: ChannelMessage) -> None:
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
    Recorder(run=run).rows(np.arange(20), {"loss": np.full(20, np.nan)})
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
    assert delivery.event is not None
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
    for _ in range(outbox.MAX_ATTEMPTS):
        before = timezone.now()
        outbox.deliver(delivery.pk)
        pauses.append((refreshed(delivery).due_at - before).total_seconds())
        Delivery.objects.update(due_at=timezone.now())
    assert pauses == sorted(pauses) and pauses[-1] > 100 * pauses[0]
    assert refreshed(delivery).failed_at is not None and outbox.due() == []


def test_what_waits_for_a_deleted_channel_is_gone(delivery: Delivery, inbox: Inbox) -> None:
    delivery.channel.delete()
    assert not outbox.deliver(delivery.pk) and outbox.due() == [] and not inbox.messages


def test_what_waits_goes_to_the_changed_address(
    delivery: Delivery, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox.error = DeliveryError("down")
    assert not outbox.deliver(delivery.pk)
    seen: list[Mapping[str, Any]] = []

    def send(config: Mapping[str, Any], message: ChannelMessage) -> None:
        seen.append(config)

    kind = ChannelType("Inbox", send, masked=lambda config: "inbox")
    monkeypatch.setattr(outbox, "CHANNELS", {**CHANNELS, "inbox": kind})
    channel = delivery.channel
    channel.config = {"url": "https://new.example/"}
    channel.save()
    Delivery.objects.update(due_at=timezone.now())
    assert outbox.deliver(delivery.pk) and seen == [{"url": "https://new.example/"}]


def test_a_clock_that_went_back_does_not_stop_a_channel(delivery: Delivery, inbox: Inbox) -> None:
    ahead = timezone.now() + timedelta(hours=1)
    Channel.objects.update(minute_started_at=ahead, minute_messages=600)
    assert outbox.deliver(delivery.pk) and len(inbox.messages) == 1


def test_a_receiver_that_asks_to_wait_is_not_tried_before(delivery: Delivery, inbox: Inbox) -> None:
    inbox.error = DeliveryError("busy", retry_after=300.0)
    before = timezone.now()
    assert not outbox.deliver(delivery.pk)
    delivery.refresh_from_db()
    assert delivery.failed_at is None and delivery.due_at >= before + timedelta(seconds=300)


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


def more_events(delivery: Delivery, count: int, severity: str = "critical") -> list[Alert]:
    """Further events of the delivery's run, enqueued."""
    assert delivery.event is not None
    fields = {"kind": "loss_spike", "severity": severity, "message": "Up."}
    first = Alert.objects.filter(kind="loss_spike").count()
    events = [
        Alert.objects.create(run=delivery.event.run, onset_step=1000 + first + i, step=2000, **fields)
        for i in range(count)
    ]
    for event in events:
        outbox.enqueue(event)
    return events


def minute_later() -> None:
    """Let a minute pass for everything that waits."""
    minute = timedelta(seconds=61)
    Channel.objects.update(minute_started_at=F("minute_started_at") - minute)
    Delivery.objects.update(due_at=F("due_at") - minute)


def run_all() -> None:
    for pk in outbox.due():
        outbox.deliver(pk)


def test_more_than_the_limit_become_one_digest(delivery: Delivery, inbox: Inbox) -> None:
    Channel.objects.update(per_minute=3)
    more_events(delivery, 9)
    run_all()
    assert [len(message.notices) for message in inbox.messages] == [1, 1, 1]
    run_all()
    assert len(inbox.messages) == 3
    minute_later()
    run_all()
    assert [len(message.notices) for message in inbox.messages] == [1, 1, 1, 7]
    assert not Delivery.objects.filter(delivered_at=None).exists() and outbox.due() == []
    keys = [notice.key for message in inbox.messages for notice in message.notices]
    assert sorted(keys) == sorted(str(key) for key in Delivery.objects.values_list("key", flat=True))
    # The next minute has room again.
    more_events(delivery, 1)
    run_all()
    assert len(inbox.messages) == 5 and len(inbox.messages[-1].notices) == 1


def test_a_digest_is_the_same_message_in_every_attempt(delivery: Delivery, inbox: Inbox) -> None:
    Channel.objects.update(per_minute=1)
    more_events(delivery, 4)
    run_all()
    minute_later()
    inbox.error = DeliveryError("Busy.")
    run_all()
    more_events(delivery, 2)
    run_all()
    inbox.error = None
    for _ in range(4):
        minute_later()
        run_all()
    digests = [message for message in inbox.messages if len(message.notices) == 4]
    assert len(digests) == 2 and digests[0] == replace(digests[1], draw_chart=digests[0].draw_chart)
    assert not Delivery.objects.filter(delivered_at=None).exists()
    keys = [message.key for message in inbox.messages]
    assert len(set(keys)) == len(keys) - 1


def test_what_was_attempted_alone_never_joins_a_digest(delivery: Delivery, inbox: Inbox) -> None:
    """A receiver may have accepted the first attempt: it would drop a digest with the same key."""
    Channel.objects.update(per_minute=2)
    inbox.error = DeliveryError("Perhaps accepted.")
    outbox.deliver(delivery.pk)
    inbox.error = None
    more_events(delivery, 4)
    Delivery.objects.update(due_at=timezone.now())
    for _ in range(3):
        run_all()
        minute_later()
    for message in inbox.messages:
        assert (
            str(delivery.key) not in [notice.key for notice in message.notices] or len(message.notices) == 1
        )
    assert not Delivery.objects.filter(delivered_at=None).exists()


def test_a_digest_that_fails_for_good_is_sent_again_as_a_whole(delivery: Delivery, inbox: Inbox) -> None:
    Channel.objects.update(per_minute=1)
    more_events(delivery, 3)
    run_all()
    minute_later()
    inbox.error = DeliveryError("Gone.", permanent=True)
    run_all()
    failed = list(Delivery.objects.exclude(failed_at=None))
    assert len(failed) == 3 and outbox.due() == []
    inbox.error = None
    minute_later()
    assert outbox.send_again(failed[-1:]) == 1
    run_all()
    assert inbox.messages[-1].key == inbox.messages[-2].key and len(inbox.messages[-1].notices) == 3
    assert not Delivery.objects.filter(delivered_at=None).exists()
    assert outbox.send_again(failed) == 0


def test_a_deleted_leader_leaves_nothing_behind(delivery: Delivery, inbox: Inbox) -> None:
    Channel.objects.update(per_minute=1)
    events = more_events(delivery, 3)
    run_all()
    minute_later()
    inbox.error = DeliveryError("Busy.")
    run_all()
    leader = Delivery.objects.get(pk__in=Delivery.objects.exclude(leader=None).values("leader"))
    assert leader.event is not None
    leader.event.delete()
    inbox.error = None
    for _ in range(3):
        minute_later()
        run_all()
    left = {event.pk for event in events} - {leader.event_id}
    assert left <= {notice.event for message in inbox.messages for notice in message.notices}
    assert not Delivery.objects.filter(delivered_at=None).exists()


@pytest.mark.parametrize(("severity", "count"), [("warning", 0), ("critical", 1)])
def test_a_channel_may_want_only_severe_alerts(
    delivery: Delivery, inbox: Inbox, severity: str, count: int
) -> None:
    Channel.objects.update(least_severity="critical")
    (event,) = more_events(delivery, 1, severity)
    assert event.deliveries.count() == count
    # An escalation is for those whom it names.
    outbox.enqueue(event, Channel.objects.filter(enabled=True), Reason.ESCALATED)
    outbox.enqueue(event, Channel.objects.filter(enabled=True), Reason.ESCALATED, occurrence=1)
    assert event.deliveries.filter(reason="escalated").count() == 2


def test_only_the_given_channels_are_used(delivery: Delivery) -> None:
    other = Channel.objects.create(project=delivery.channel.project, kind="inbox", name="other")
    assert delivery.event is not None
    event = Alert.objects.create(
        run=delivery.event.run, kind="loss_spike", onset_step=1, step=2, severity="warning"
    )
    outbox.enqueue(event, [other])
    outbox.enqueue(event, [other])
    assert [each.channel for each in event.deliveries.all()] == [other]


def test_the_end_of_an_alert_is_told_to_those_who_want_it(delivery: Delivery, inbox: Inbox) -> None:
    event = delivery.event
    assert event is not None
    Channel.objects.create(project=delivery.channel.project, kind="inbox", name="new", send_resolved=True)
    Channel.objects.filter(pk=delivery.channel_id).update(send_resolved=True)
    assert resolve(event) and not resolve(event)
    # The new channel never heard of the alert.
    (resolved,) = Delivery.objects.filter(reason="resolved")
    assert resolved.channel_id == delivery.channel_id
    # It waits until the alert itself was sent, although both are due.
    assert not outbox.deliver(resolved.pk) and not inbox.messages
    assert outbox.deliver(delivery.pk)
    minute_later()
    assert outbox.deliver(resolved.pk)
    opened, ended = (message.notices[0] for message in inbox.messages)
    assert (opened.reason, ended.reason, ended.state) == ("opened", "resolved", "resolved")
    assert opened.key == opened.alert == ended.alert != ended.key


def test_without_the_choice_the_end_is_not_sent(delivery: Delivery) -> None:
    assert delivery.event is not None and resolve(delivery.event)
    assert not Delivery.objects.filter(reason="resolved").exists()


def test_a_run_that_recovers_sends_the_end(delivery: Delivery) -> None:
    Channel.objects.update(send_resolved=True)
    run = make_run(delivery.channel.project, "another")
    recorder = Recorder(run=run)
    recorder.rows(np.arange(20), {"loss": np.full(20, np.nan)})
    evaluate(run.id)
    assert not Delivery.objects.filter(reason="resolved").exists()
    recorder.rows(np.arange(20, 400), {"loss": np.full(380, 2.0)})
    evaluate(run.id)
    (ended,) = Delivery.objects.filter(reason="resolved")
    assert ended.event is not None and ended.event.run_id == run.id


def test_a_test_is_attempted_once_and_ignores_the_limit(delivery: Delivery, inbox: Inbox) -> None:
    Channel.objects.update(per_minute=1)
    assert outbox.deliver(delivery.pk)
    inbox.error = DeliveryError("No.")
    test = outbox.enqueue_test(delivery.channel)
    assert not outbox.deliver(test.pk)
    assert refreshed(test).failed_at is not None and test.last_error == "No."
    assert inbox.messages[-1].notices == ()


def test_a_lost_key_is_no_crash_and_waits_for_the_key(
    delivery: Delivery, inbox: Inbox, settings: LazySettings
) -> None:
    delivery.channel.config = {"url": "https://x.test"}
    delivery.channel.save()
    former, settings.SECRET_KEY = settings.SECRET_KEY, "another"
    assert not outbox.deliver(delivery.pk)
    assert "secret key" in refreshed(delivery).last_error and delivery.failed_at is None
    minute_later()
    settings.SECRET_KEY_FALLBACKS = [former]
    assert outbox.deliver(delivery.pk)


def test_a_delivery_whose_worker_dies_every_time_ends(delivery: Delivery, inbox: Inbox) -> None:
    long_ago = timezone.now() - outbox.CLAIM_EXPIRES - timedelta(seconds=1)
    Delivery.objects.update(claimed_at=long_ago, attempts=outbox.MAX_ATTEMPTS)
    assert outbox.due() == []
    assert "killed" in refreshed(delivery).last_error and delivery.failed_at is not None


def test_a_chart_that_cannot_be_drawn_stops_nothing(delivery: Delivery, inbox: Inbox) -> None:
    Alert.objects.update(evidence={"series": [{"name": "loss", "steps": [1], "values": ["nonsense"]}]})
    assert outbox.deliver(delivery.pk)
    assert inbox.messages[0].draw_chart() is None


def test_the_chart_is_drawn_from_the_evidence(delivery: Delivery, inbox: Inbox) -> None:
    steps = list(range(20))
    Alert.objects.update(
        evidence={"series": [{"name": "loss", "steps": steps, "values": [2.0] * 19 + ["NaN"]}]}
    )
    assert outbox.deliver(delivery.pk)
    assert (inbox.messages[0].draw_chart() or b"").startswith(b"\x89PNG")
