"""The lifecycle of an alert: its transitions, its history, reopening, silence and escalation."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.alerting import make_hook
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.delivery import routing
from fp8scope_dashboard.alerts.models import (
    Alert,
    AlertState,
    Channel,
    Delivery,
    EntryKind,
    HistoryEntry,
    Reason,
    Rule,
)
from fp8scope_dashboard.alerts.services import alerts_after, evaluate
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada(db: None) -> User:
    return User.objects.create_user("ada")


def make_event(project: Project, **fields: Any) -> Alert:
    rule = Rule.objects.get(project=project, kind="loss_spike")
    fields = {"run": make_run(project), "rule": rule, "severity": "warning", "onset_step": 1} | fields
    return Alert.objects.create(**({"kind": "loss_spike", "step": 4, "message": "up"} | fields))


def kinds(event: Alert) -> list[str]:
    return list(event.history.values_list("kind", flat=True))


def in_an_hour() -> datetime:
    return timezone.now() + timedelta(hours=1)


def test_it_works(project: Project, ada: User) -> None:
    event = make_event(project)
    assert lifecycle.acknowledge(event, ada) and event.state == AlertState.ACKNOWLEDGED
    assert lifecycle.mute(event, ada, in_an_hour()) and event.state == AlertState.MUTED
    assert lifecycle.unmute(event, ada) and event.state == AlertState.OPEN
    assert lifecycle.resolve(event, ada) and event.state == AlertState.RESOLVED
    assert lifecycle.reopen(event, ada) and event.state == AlertState.OPEN and event.reopened == 1
    lifecycle.comment(event, ada, "  Seen in the last run too. ")
    assert kinds(event) == ["acknowledged", "muted", "unmuted", "resolved", "reopened", "comment"]
    last = event.history.last()
    assert last is not None and last.user == ada and last.text == "Seen in the last run too."


MOVES = ("acknowledge", "mute", "unmute", "resolve", "reopen")
AFTER = {
    "acknowledge": "acknowledged",
    "mute": "muted",
    "unmute": "open",
    "resolve": "resolved",
    "reopen": "open",
}
ENTRIES = {**AFTER, "unmute": "unmuted", "reopen": "reopened"}
ALLOWED = {
    "acknowledge": {"open", "muted"},
    "mute": {"open", "acknowledged", "muted"},
    "unmute": {"muted"},
    "resolve": {"open", "acknowledged", "muted"},
    "reopen": {"resolved"},
}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.booleans()), max_size=12))
def test_any_sequence_of_changes(project: Project, moves: list[tuple[str, bool]]) -> None:
    """Forbidden changes change nothing; every other one has one entry, with its person or none."""
    ada, _ = User.objects.get_or_create(username="ada")
    event = make_event(project)
    expected = "open"
    entries: list[tuple[str, User | None]] = []
    for move, by_hand in moves:
        user = ada if by_hand or move in ("acknowledge", "mute") else None
        arguments = (in_an_hour(),) if move == "mute" else ()
        changed = getattr(lifecycle, move)(event, user, *arguments)
        assert changed == (expected in ALLOWED[move])
        if changed:
            expected = AFTER[move]
            entries.append((ENTRIES[move], user))
        event.refresh_from_db()
        assert event.state == expected
        assert (event.muted_until is not None) == (expected == "muted")
        assert (event.resolved_at is not None) == (expected == "resolved")
        assert (event.acknowledged_by is not None) >= (expected == "acknowledged")
    assert [(entry.kind, entry.user) for entry in event.history.select_related("user")] == entries
    assert event.reopened == sum(kind == "reopened" for kind, _ in entries)


@pytest.mark.parametrize(
    "ahead", [timedelta(0), -timedelta(hours=1), lifecycle.LONGEST_MUTE + timedelta(hours=1)]
)
def test_refuses_a_silence_that_is_over_or_too_long(project: Project, ada: User, ahead: timedelta) -> None:
    event = make_event(project)
    with pytest.raises(lifecycle.LifecycleError, match="30 days"):
        lifecycle.mute(event, ada, timezone.now() + ahead)
    assert kinds(event) == []


def test_a_silence_ends_by_itself(project: Project, ada: User) -> None:
    event, other = make_event(project), make_event(project)
    for each in (event, other):
        lifecycle.mute(each, ada, in_an_hour())
    Alert.objects.filter(pk=event.pk).update(muted_until=timezone.now() - timedelta(seconds=1))
    assert lifecycle.unmute_due() == 1
    event.refresh_from_db()
    other.refresh_from_db()
    assert (event.state, other.state) == ("open", "muted")
    assert event.history.last().user is None  # type: ignore[union-attr]


def test_two_people_acknowledge_at_the_same_time(project: Project, ada: User) -> None:
    event = make_event(project)
    same = Alert.objects.get(pk=event.pk)
    assert lifecycle.acknowledge(event, ada)
    assert not lifecycle.acknowledge(same, User.objects.create_user("ben"))
    assert kinds(event) == ["acknowledged"]


def test_refuses_to_reopen_beside_a_newer_alert(project: Project, ada: User) -> None:
    old = make_event(project)
    lifecycle.resolve(old, ada)
    make_event(project, run=old.run, onset_step=50)
    with pytest.raises(lifecycle.LifecycleError, match="newer"):
        lifecycle.reopen(old, ada)


@pytest.mark.parametrize("text", ["", "   ", "x" * 2001, "a\0b"])
def test_refuses_an_empty_or_long_comment(project: Project, ada: User, text: str) -> None:
    event = make_event(project)
    with pytest.raises(lifecycle.LifecycleError):
        lifecycle.comment(event, ada, text)
    assert kinds(event) == []


def losses(*faulty: tuple[int, int]) -> np.ndarray:
    loss = 2.0 + np.random.default_rng(0).normal(0, 0.01, 400)
    for first, last in faulty:
        loss[first:last] = np.nan
    return loss


def test_a_condition_that_comes_back_reopens_its_alert(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run)
    make_hook(project, "hook")
    loss = losses((100, 105), (150, 155), (350, 355))
    recorder.rows(np.arange(140), {"loss": loss[:140]})
    (event,) = evaluate(run.id)
    (sent,) = alerts_after(run.id, 0)
    event.refresh_from_db()
    assert event.state == AlertState.RESOLVED and alerts_after(run.id, sent["id"]) == []
    recorder.rows(np.arange(140, 300), {"loss": loss[140:300]})
    assert evaluate(run.id) == [event]
    (again,) = alerts_after(run.id, sent["id"])
    assert again["id"] > sent["id"] and again["onset_step"] == 100
    event.refresh_from_db()
    assert event.reopened == 1 and kinds(event) == ["opened", "resolved", "reopened", "resolved"]
    assert list(event.deliveries.order_by("id").values_list("reason", flat=True)) == ["opened", "reopened"]
    # Long after, it is another alert.
    recorder.rows(np.arange(300, 400), {"loss": loss[300:]})
    (later,) = evaluate(run.id)
    assert later != event and later.id > again["id"] and later.onset_step == 350


def escalating(project: Project, **fields: Any) -> tuple[Alert, Channel]:
    channel = make_hook(project, "phone")
    rule = Rule.objects.get(project=project, kind="loss_spike")
    rule.escalate_minutes = 10
    rule.save()
    rule.escalation_channels.set([channel])
    return make_event(project, waiting_since=timezone.now() - timedelta(minutes=11), **fields), channel


def test_escalates_once_if_nobody_acknowledges(project: Project) -> None:
    event, channel = escalating(project)
    assert routing.escalate_due() == 1 and routing.escalate_due() == 0
    delivery = Delivery.objects.get(event=event)
    assert (delivery.channel, delivery.reason) == (channel, "escalated")
    entry = event.history.get()
    assert entry.kind == EntryKind.ESCALATED and "10 minutes" in entry.text and "phone" in entry.text


def test_does_not_escalate_what_somebody_has_seen(project: Project, ada: User) -> None:
    event, _ = escalating(project)
    lifecycle.acknowledge(event, ada)
    assert make_event(project).state == "open" and routing.escalate_due() == 0


def test_does_not_escalate_alerts_of_deleted_runs(project: Project) -> None:
    event, _ = escalating(project)
    Run.objects.filter(pk=event.run_id).update(deleted_at=timezone.now())
    assert routing.escalate_due() == 0


def test_escalates_again_after_it_was_reopened(project: Project, ada: User) -> None:
    event, _ = escalating(project)
    routing.escalate_due()
    lifecycle.resolve(event, ada)
    lifecycle.reopen(event, ada)
    assert routing.escalate_due() == 0
    Alert.objects.filter(pk=event.pk).update(waiting_since=timezone.now() - timedelta(minutes=11))
    assert routing.escalate_due() == 1 and Delivery.objects.filter(reason="escalated").count() == 2


@pytest.mark.parametrize(
    ("moment", "begin", "end", "zone", "until"),
    [
        # Berlin is two hours ahead of UTC in July, and one in January.
        ("2026-07-01T20:30", "22:00", "07:00", "Europe/Berlin", "2026-07-02T05:00"),
        ("2026-07-02T04:59", "22:00", "07:00", "Europe/Berlin", "2026-07-02T05:00"),
        ("2026-07-02T05:00", "22:00", "07:00", "Europe/Berlin", None),
        ("2026-07-01T19:59", "22:00", "07:00", "Europe/Berlin", None),
        ("2026-01-01T21:30", "22:00", "07:00", "Europe/Berlin", "2026-01-02T06:00"),
        ("2026-01-01T12:30", "12:00", "13:00", "UTC", "2026-01-01T13:00"),
        ("2026-01-01T13:00", "12:00", "13:00", "UTC", None),
        # Clocks go forward at 01:00 UTC on 29 March.
        ("2026-03-28T22:00", "22:00", "07:00", "Europe/Berlin", "2026-03-29T05:00"),
    ],
)
def test_quiet_hours(moment: str, begin: str, end: str, zone: str, until: str | None) -> None:
    ends = routing.quiet_until(
        datetime.fromisoformat(moment).replace(tzinfo=UTC),
        time.fromisoformat(begin),
        time.fromisoformat(end),
        zone,
    )
    assert ends == (None if until is None else datetime.fromisoformat(until).replace(tzinfo=UTC))


@pytest.mark.parametrize(
    ("severity", "breaks", "waits"),
    [("warning", True, True), ("critical", True, False), ("critical", False, True)],
)
def test_notices_wait_for_the_end_of_quiet_hours(
    project: Project, severity: str, breaks: bool, waits: bool
) -> None:
    hook = make_hook(project, "hook")
    make_hook(project, "other")
    now = timezone.now()
    rule = Rule.objects.get(project=project, kind="loss_spike")
    rule.quiet_from, rule.quiet_to = (now - timedelta(hours=1)).time(), (now + timedelta(hours=1)).time()
    rule.quiet_zone, rule.critical_breaks_quiet = "UTC", breaks
    rule.save()
    rule.channels.set([hook])
    event = make_event(project, rule=rule, severity=severity)
    routing.notify(event, Reason.OPENED)
    delivery = Delivery.objects.get(event=event)
    assert delivery.channel == hook
    assert (delivery.due_at > now + timedelta(minutes=50)) == waits


def test_the_history_keeps_the_name_of_a_deleted_person(project: Project, ada: User) -> None:
    event = make_event(project)
    lifecycle.acknowledge(event, ada)
    ada.delete()
    entry = HistoryEntry.objects.get(event=event)
    assert entry.user is None and entry.user_name == "ada"
