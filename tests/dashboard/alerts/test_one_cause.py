"""Alerts of several rules about the same tensors are one alert."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from dashboard.helpers.recording import make_run

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import alert_updates
from fp8scope_dashboard.alerts.alert_updates import Detection
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.detectors import ConditionChange
from fp8scope_dashboard.alerts.models import Alert, AlertState, Channel, Delivery, EntryKind, Rule
from fp8scope_dashboard.alerts.services import alerts_after
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(db: None) -> Run:
    return make_run(create_project("default", "Default"))


@pytest.fixture
def channel(run: Run) -> Channel:
    channel = Channel(project=run.project, kind="webhook", name="hook")
    channel.config = {"url": "https://hooks.example.org/x", "secret": "s"}
    channel.save()
    return channel


def rule(run: Run, kind: str) -> Rule:
    return Rule.objects.get(project=run.project, kind=kind)


def finding(onset: int, *names: str, over: int = 0, layers: tuple[int, ...] = ()) -> ConditionChange:
    tensors = [{"name": name, "onset_step": onset} for name in names]
    evidence = {"tensors": tensors, "tensors_over": over or len(names), "layers": list(layers)}
    return ConditionChange(
        opened=True,
        onset_step=onset,
        step=onset + 9,
        value=0.5,
        threshold=None,
        message=f"{len(names)} tensors.",
        evidence=evidence,
    )


def apply(run: Run, *each: tuple[str, ConditionChange]) -> list[Alert]:
    detections = [Detection(rule(run, kind), found, "writer/0", "0") for kind, found in each]
    return alert_updates.apply(run, detections).opened


UP, DOWN = "blocks.3.mlp.up", "blocks.3.mlp.down"
OVERFLOW = ("saturation_rate", finding(300, f"{UP}.input", f"{DOWN}.input"))
UNDERFLOW = ("underflow_rate", finding(350, f"{UP}.grad_output"))
FROZEN = ("scale_frozen", finding(310, f"{UP}.input"))


def test_it_works(run: Run, channel: Channel) -> None:
    (event,) = apply(run, OVERFLOW)
    assert apply(run, UNDERFLOW) == [] and Alert.objects.count() == 1
    event.refresh_from_db()
    (further,) = event.evidence["further"]
    assert (further["title"], further["onset_step"]) == ("Underflow rate", 350)
    assert event.severity == "warning" and Delivery.objects.count() == 1
    entry = event.history.get(kind=EntryKind.UPDATED)
    assert entry.text == "Underflow rate: 1 tensors."


def test_a_more_severe_rule_raises_the_alert_and_sends_it_again(run: Run, channel: Channel) -> None:
    (event,) = apply(run, OVERFLOW)
    assert apply(run, FROZEN) == []
    event.refresh_from_db()
    assert event.severity == "critical"
    # Its title is that of the first rule: so is the beginning of its message.
    own, _, more = event.message.partition(" Frozen scale: ")
    assert own and more and not own.startswith("Frozen")
    assert list(Delivery.objects.order_by("id").values_list("reason", flat=True)) == ["opened", "worse"]
    (alert,) = alerts_after(run.pk, event.pk)
    assert alert["severity"] == "critical"


def test_an_alert_that_opens_with_its_further_evidence_is_sent_once(run: Run, channel: Channel) -> None:
    (event,) = apply(run, OVERFLOW, FROZEN, UNDERFLOW)
    assert event.severity == "critical" and len(event.evidence["further"]) == 2
    assert Delivery.objects.get().reason == "opened"


def test_other_tensors_or_a_later_onset_are_another_alert(run: Run) -> None:
    apply(run, OVERFLOW)
    other = finding(350, "blocks.9.mlp.up.input")
    later = finding(900, f"{UP}.input")
    assert [event.kind for event in apply(run, ("underflow_rate", other))] == ["underflow_rate"]
    assert [event.kind for event in apply(run, ("scale_stale", later))] == ["scale_stale"]


def test_a_cause_comes_back_while_another_of_its_rule_lasts(run: Run) -> None:
    """A rule about tensors may have several alerts at once; the run is still judged."""
    (first,) = apply(run, ("scale_frozen", finding(300, f"{UP}.input")))
    (second,) = apply(run, ("scale_frozen", finding(600, "blocks.9.mlp.up.input")))
    end = replace(finding(300, f"{UP}.input"), opened=False, step=1_000)
    apply(run, ("scale_frozen", end))
    first.refresh_from_db()
    assert first.state == AlertState.RESOLVED
    assert apply(run, ("scale_frozen", finding(1_010, f"{UP}.input"))) == [first]
    assert set(Alert.objects.filter(state=AlertState.OPEN)) == {first, second}


def test_of_many_tensors_the_layers_are_compared(run: Run) -> None:
    many = finding(300, "blocks.1.mlp.up.input", over=40, layers=tuple(range(20)))
    same = finding(320, "blocks.9.attention.input", over=30, layers=tuple(range(5, 20)))
    others = finding(320, "blocks.30.attention.input", over=30, layers=tuple(range(19, 40)))
    apply(run, ("saturation_rate", many))
    assert apply(run, ("underflow_rate", same)) == []
    assert len(apply(run, ("scale_stale", others))) == 1


def test_the_alert_lasts_until_the_last_condition_ends(run: Run) -> None:
    (event,) = apply(run, OVERFLOW)
    apply(run, UNDERFLOW)
    apply(run, ("saturation_rate", ConditionChange(opened=False, onset_step=300, step=420)))
    event.refresh_from_db()
    assert event.state == AlertState.OPEN
    texts = event.history.values_list("text", flat=True)
    assert list(texts)[-1] == "Saturation rate has ended; other conditions last."
    apply(run, ("underflow_rate", ConditionChange(opened=False, onset_step=350, step=440)))
    event.refresh_from_db()
    assert (event.state, event.resolved_step) == (AlertState.RESOLVED, 440)


def test_more_tensors_of_the_other_rule_complete_its_evidence(run: Run) -> None:
    (event,) = apply(run, OVERFLOW)
    apply(run, UNDERFLOW)
    more = finding(350, f"{UP}.grad_output", f"{DOWN}.grad_output")
    update = ConditionChange(**{**more.__dict__, "update": True})
    assert apply(run, ("underflow_rate", update)) == []
    event.refresh_from_db()
    (further,) = event.evidence["further"]
    assert further["message"] == "2 tensors." and event.message == "2 tensors."


def test_a_rule_that_is_switched_off_no_longer_holds_the_alert(run: Run) -> None:
    (event,) = apply(run, OVERFLOW)
    apply(run, UNDERFLOW)
    for kind, state in (("underflow_rate", AlertState.OPEN), ("saturation_rate", AlertState.RESOLVED)):
        rule_store._close_alerts(rule(run, kind), "The rule was switched off.")
        event.refresh_from_db()
        assert event.state == state


@pytest.mark.parametrize("change", [{"action": "fallback"}, {"escalate_minutes": 5}])
def test_a_rule_with_an_order_or_another_escalation_has_its_own_alert(
    run: Run, change: dict[str, object]
) -> None:
    Rule.objects.filter(project=run.project, kind="scale_frozen").update(**change)
    apply(run, OVERFLOW)
    assert [event.kind for event in apply(run, FROZEN)] == ["scale_frozen"]


def test_an_alert_begins_with_the_earliest_evidence_of_its_rules(run: Run) -> None:
    apply(run, OVERFLOW)
    apply(run, ("scale_stale", finding(290, f"{UP}.input", f"{UP}.weight")))
    (event,) = Alert.objects.all()
    assert event.onset_step == 290 and event.evidence["own_onset"] == 300
    # What the first rule finds further still belongs to the alert, and ends it.
    more = ConditionChange(**{**asdict(OVERFLOW[1]), "update": True})
    apply(
        run,
        ("saturation_rate", more),
        ("saturation_rate", ConditionChange(opened=False, onset_step=300, step=340)),
    )
    apply(run, ("scale_stale", ConditionChange(opened=False, onset_step=290, step=341)))
    event.refresh_from_db()
    assert Alert.objects.count() == 1 and event.state == AlertState.RESOLVED


def test_an_overflow_does_not_begin_with_the_scale_that_froze(run: Run) -> None:
    """A scale may stay the same for a history's length before it is wrong."""
    apply(run, OVERFLOW)
    apply(run, ("scale_frozen", finding(285, f"{UP}.input")))
    (event,) = Alert.objects.all()
    assert event.onset_step == 300
    (further,) = event.evidence["further"]
    assert (further["kind"], further["onset_step"]) == ("scale_frozen", 285)


def test_an_alert_begins_with_its_first_tensor(run: Run) -> None:
    """The tensor that is sure first is not always the one that began first."""
    late = finding(300, f"{UP}.input")
    late.evidence["first"] = {"name": f"{DOWN}.input", "onset_step": 240, "after_step": 239}
    (event,) = apply(run, ("saturation_rate", late))
    assert event.onset_step == 240
    assert apply(run, ("saturation_rate", late)) == [] and Alert.objects.count() == 1
