"""Rules of a new project, alerts in responses to training processes, acknowledging and resolving."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.lifecycle import acknowledge, resolve
from fp8scope_dashboard.alerts.models import Alert, AlertState, Rule, RuleKind
from fp8scope_dashboard.alerts.services import alerts_after, create_default_rules, evaluate

pytestmark = pytest.mark.django_db


@pytest.fixture
def event(project: Project) -> Alert:
    run = make_run(project)
    Recorder(run=run).rows(np.arange(5), {"loss": [2.0, 2.0, np.nan, np.nan, np.nan]})
    return evaluate(run.id)[0]


def test_it_works(event: Alert) -> None:
    (alert,) = alerts_after(event.run_id, 0)
    assert alert["id"] == event.id and alert["onset_step"] == 2 and alert["value"] is None
    assert set(alert) == {
        "id", "kind", "rule", "severity", "step", "onset_step", "value", "threshold", "message", "opened_at"
    }  # fmt: skip
    assert alerts_after(event.run_id, event.id) == []


def test_the_model_and_the_rules_have_the_same_kinds() -> None:
    assert set(rules.KINDS) == set(RuleKind.values)


def test_a_project_begins_with_every_rule_once(project: Project) -> None:
    create_default_rules(project)
    kinds = Rule.objects.filter(project=project).values_list("kind", flat=True)
    assert sorted(kinds) == sorted(set(RuleKind.values) - {"threshold"})
    for rule in Rule.objects.all():
        assert rules.validate(rule.kind, rule.parameters) == rule.parameters


def test_only_the_first_person_acknowledges_an_event(event: Alert) -> None:
    first, second = User.objects.create(username="a"), User.objects.create(username="b")
    assert acknowledge(event, first)
    assert not acknowledge(event, second)
    assert event.state == AlertState.ACKNOWLEDGED and event.acknowledged_by == first


def test_a_manually_resolved_event_stays_resolved(event: Alert) -> None:
    assert resolve(event) and event.state == AlertState.RESOLVED
    assert not resolve(event)
    evaluate(event.run_id)
    assert Alert.objects.count() == 1


def test_evidence_is_strict_json(event: Alert) -> None:
    json.dumps(event.evidence, allow_nan=False)


def test_alerts_of_other_runs_are_left_out(event: Alert, project: Project) -> None:
    assert alerts_after(make_run(project).id, 0) == []
