"""What a message says of an alert, from stored events: enough to act on without opening a page."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from dashboard.helpers.alerting import make_hook
from dashboard.helpers.faults import FAULTY_FROM, LENGTH, RECIPE, TENSORS, part, shorten_rules
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.channels import Notice, wording
from fp8scope_dashboard.alerts.delivery import message
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery, EntryKind
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.diagnosis.models import Diagnosis

pytestmark = pytest.mark.django_db


@pytest.fixture
def project(db: None) -> Project:
    project = create_project("default", "Default")
    shorten_rules(project)
    Channel.objects.filter(pk=make_hook(project).pk).update(send_resolved=True)
    return project


def event_of(project: Project, kind: str) -> Alert:
    """The alert of a run at fault."""
    recorder = Recorder(run=make_run(project, "gpt-7b", recipe=RECIPE), tensors=TENSORS)
    recorder.rows(range(1, LENGTH + 1), *part(kind), rows_per_batch=LENGTH)
    (event,) = [event for event in evaluate(recorder.run.id) if event.kind == kind]
    return event


def notice_of(event: Alert, reason: str = "opened") -> Notice:
    delivery = Delivery.objects.filter(event=event, reason=reason).latest("id")
    (notice,) = message.compose(delivery).notices
    return notice


def test_it_works(project: Project) -> None:
    event = event_of(project, "saturation_rate")
    opened = datetime(2026, 3, 1, 2, 3, 4, tzinfo=UTC)
    Alert.objects.filter(pk=event.pk).update(opened_at=opened)
    composed = message.compose(Delivery.objects.get(event=event))
    assert wording.title(composed) == "Saturation rate in gpt-7b [warning]"
    lines = wording.text(composed).splitlines()
    assert lines[0].startswith(f"{TENSORS[1]} overflows since step {FAULTY_FROM + 1}: 2 % of")
    later = event.step - FAULTY_FROM - 1
    assert later > 1
    onset = f"Onset at step {FAULTY_FROM + 1}, found at step {event.step}, {later} steps later."
    assert lines[1] == f"{onset} Alert opened 2026-03-01 02:03:04 UTC."
    assert lines[-1].endswith(f"/p/default/alerts/{event.pk}/")
    assert composed.notices[0].run_url.endswith(f"/p/default/runs/{event.run_id}/")


def test_the_onset_of_a_tensor_that_is_not_always_observed_is_an_interval(project: Project) -> None:
    event = event_of(project, "kurtosis_growth")
    event.evidence["first"]["after_step"] = FAULTY_FROM - 19
    event.save()
    text = "\n".join(wording.details(notice_of(event)))
    assert f"Onset at step {FAULTY_FROM - 18}–{FAULTY_FROM + 1}, found at step" in text


def test_all_tensors_are_counted_and_the_worst_are_named(project: Project) -> None:
    event = event_of(project, "saturation_rate")
    names = [f"blocks.{i}.mlp.input" for i in range(10)]
    event.evidence |= {"tensors": [{"name": name} for name in names], "tensors_over": 1_240}
    event.save()
    assert f"Tensors (1,240): {', '.join(names[:5])} and 1,235 more" in wording.details(notice_of(event))


def test_a_message_has_what_is_known_by_then(project: Project) -> None:
    event = event_of(project, "scale_frozen")
    Diagnosis.objects.create(
        run=event.run, outcome="cause", cause="x", sentence="The scale is frozen by an Inf.", result={}
    )
    lifecycle.write(event, EntryKind.ORDERED, text="Fall back to BF16: 1 layer.")
    lines = wording.details(notice_of(event))
    assert "Suspected cause: The scale is frozen by an Inf." in lines
    assert "Command: Fall back to BF16: 1 layer." in lines
    assert any(line.startswith("Also: Growing amax since step") for line in lines)


def test_a_later_notice_says_why_it_is_sent(project: Project) -> None:
    event = event_of(project, "saturation_rate")
    ada = User.objects.create_user("ada")
    lifecycle.resolve(event, ada, step=1_240)
    assert notice_of(event, "resolved").note == "Resolved by ada at step 1,240."
    lifecycle.reopen(event)
    lifecycle.resolve(event, step=1_300)
    assert notice_of(event, "resolved").note == "Resolved at step 1,300. The condition has ended."


def test_a_clear_run_has_no_suspected_cause(project: Project) -> None:
    event = event_of(project, "saturation_rate")
    Diagnosis.objects.create(run=event.run, outcome="clear", sentence="Nothing.", result={})
    assert notice_of(event).cause == ""
