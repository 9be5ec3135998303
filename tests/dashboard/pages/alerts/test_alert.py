"""The page of one alert: its evidence, cause, orders and history, and what people change."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import send_report
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.models import Alert, EntryKind, Rule
from fp8scope_dashboard.control.commands import carry_out_rule_action
from fp8scope_dashboard.control.models import Command
from fp8scope_dashboard.diagnosis.models import Diagnosis


def make_event(visitor: Visitor, **fields: Any) -> Alert:
    rule = Rule.objects.get(project=visitor.project, kind="loss_spike")
    defaults = {"rule": rule, "kind": "loss_spike", "severity": "warning", "onset_step": 1, "step": 4}
    event = Alert.objects.create(
        **({"run": make_run(visitor.project, "a run"), "message": "Up."} | defaults | fields)
    )
    lifecycle.note_opened(event)
    return event


def html(visitor: Visitor, event: Alert) -> str:
    answer = visitor.client.get(visitor.address(f"alerts/{event.id}/"))
    assert answer.status_code == 200
    return answer.content.decode()


def change(visitor: Visitor, event: Alert, action: str, **fields: str) -> str:
    address = visitor.address(f"alerts/{event.id}/")
    answer = visitor.client.post(f"{address}{action}", {"next": address, **fields}, follow=True)
    event.refresh_from_db()
    return answer.content.decode()


def test_it_works(admin: Visitor) -> None:
    event = make_event(
        admin,
        message="The <loss> rose.",
        evidence={
            "tensors": [{"name": "blocks.0.input"}],
            "tensors_over": 4,
            "series": [{"name": "loss", "steps": [0, 1, 2], "values": [1.0, 2.0, "NaN"]}],
        },
    )
    page = html(admin, event)
    assert "The &lt;loss&gt; rose." in page and "blocks.0.input" in page and "and 3 more" in page
    assert f"alerts/{event.id}/evidence.json" in page and "No cause is known" in page


def test_begins_with_what_happened_and_what_to_do(member: Visitor) -> None:
    page = html(member, make_event(member))
    parts = ("Up.</p>", "Acknowledge<", "<dt>Began</dt>", "Suspected cause", '<h2 id="history-title">')
    assert [page.index(part) for part in parts] == sorted(page.index(part) for part in parts)
    assert "evidence.json" not in page, "without series there is no empty chart"


def test_a_person_goes_through_the_life_of_an_alert(member: Visitor) -> None:
    event = make_event(member)
    assert "Muted for 4 hours" in change(member, event, "mute", until="4") and event.state == "muted"
    assert "Unmuted" in change(member, event, "unmute") and event.state == "open"
    assert "Acknowledged" in change(member, event, "acknowledge") and event.state == "acknowledged"
    assert "Nothing was changed" in change(member, event, "acknowledge")
    assert "Resolved" in change(member, event, "resolve") and event.state == "resolved"
    assert "Reopened" in change(member, event, "reopen") and event.state == "open"
    page = change(member, event, "comment", text="It <was> the data.\nOn day 2.")
    assert "It &lt;was&gt; the data.<br>On day 2." in page
    assert "mia</strong> commented</span>" in page, "its text is below"
    lifecycle.write(event, EntryKind.UPDATED, text="Loss <spike>: 12 % higher.")
    updated = "updated: Loss &lt;spike&gt;: 12\u202f% higher.</span>"
    assert f"Automatically</strong> {updated}" in html(member, event)
    for line in (
        "mia</strong> muted",
        "mia</strong> resolved",
        "mia</strong> reopened",
        "Automatically</strong> opened",
    ):
        assert line in page


@pytest.mark.parametrize(
    ("action", "fields", "message"),
    [
        ("mute", {"until": "9999"}, "Choose how long"),
        ("mute", {"until": "own"}, "Enter the time"),
        ("mute", {"until": "own", "time": "2020-01-01T09:00"}, "within the next"),
        ("mute", {}, "Choose how long"),
        ("comment", {"text": " "}, "1 to 2,000 characters"),
        ("comment", {"text": "x" * 2001}, "1 to 2,000 characters"),
    ],
)
def test_says_what_is_wrong(member: Visitor, action: str, fields: dict[str, str], message: str) -> None:
    event = make_event(member)
    assert message in change(member, event, action, **fields)
    assert event.state == "open" and event.history.count() == 1


def test_shows_the_suspected_cause(admin: Visitor) -> None:
    event = make_event(admin)
    Diagnosis.objects.create(run=event.run, outcome="clear", sentence="Nothing.", result={}, inputs="")
    assert "No cause is known" in html(admin, event)
    Diagnosis.objects.update(outcome="suspect", sentence="The scale of <x> froze.")
    page = html(admin, event)
    assert "The scale of &lt;x&gt; froze." in page and "Possible, not shown." in page


@pytest.mark.parametrize("action", ["checkpoint", "pause"])
def test_shows_what_the_rule_ordered_and_what_came_of_it(admin: Visitor, action: str) -> None:
    rule = Rule.objects.get(project=admin.project, kind="loss_spike")
    rule.action = action
    rule.save()
    event = make_event(admin, rule=rule)
    writer = Recorder(run=event.run, tensors=())
    send_report(writer, kind="accepts", accepts=[action])
    carry_out_rule_action(event)
    command = Command.objects.get(event=event)
    assert command.kind == action and "What the rule ordered" in html(admin, event)
    send_report(writer, kind="command", command=command.pk, state="done", message="saved <it>", step=70)
    page = html(admin, event)
    assert "saved &lt;it&gt;" in page and "step 70" in page and "Done" in page
    assert "Automatically</strong> ordered" in page


def test_says_why_nothing_was_ordered(admin: Visitor) -> None:
    rule = Rule.objects.get(project=admin.project, kind="loss_spike")
    rule.action = "checkpoint"
    event = make_event(admin, rule=rule)
    carry_out_rule_action(event)
    page = html(admin, event)
    assert "Write a checkpoint: not possible. The training script does not accept this command." in page
    assert not Command.objects.exists()


def test_a_viewer_sees_no_forms(viewer: Visitor) -> None:
    event = make_event(viewer)
    page = html(viewer, event)
    assert "Up." in page and f"alerts/{event.id}/" in page
    assert "Resolve" not in page and "Add the comment" not in page


def test_a_refresh_gets_only_the_part_that_changes(admin: Visitor) -> None:
    event = make_event(admin)
    answer = admin.client.get(admin.address(f"alerts/{event.id}/"), headers={"HX-Target": "alert"})
    part = answer.content.decode().strip()
    assert part.startswith('<div id="alert"') and 'id="alert-more"' in part and "Add the comment" not in part
