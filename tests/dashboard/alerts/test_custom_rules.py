"""Rules that people write: evaluated over stored runs, for a project or one run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.custom_rules import documents as rule_documents
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.detection import custom_rules
from fp8scope_dashboard.alerts.models import Alert, Rule
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db

STEPS = np.arange(1, 101)
TENSORS = ("blocks.0.up.input", "blocks.0.up.weight", "blocks.1.up.input", "head.input")


@pytest.fixture
def project(db: None) -> Project:
    project = create_project("research", "Research")
    Rule.objects.filter(project=project).update(enabled=False)
    return project


def add(project: Project, **document: Any) -> Rule:
    defaults = {"name": "mine", "statistic": "grad_norm", "condition": "above", "value": 10, "points": 3}
    return rule_store.save(rule_documents.parse(project, defaults | document))


def scalar(project: Project, name: str = "grad_norm", first: int = 50, last: int = 60) -> Run:
    run = make_run(project)
    values = np.where((first <= STEPS) & (last > STEPS), 20.0, 1.0)
    Recorder(run=run).rows(STEPS, {"loss": np.ones(100), name: values})
    return run


def test_it_works(project: Project) -> None:
    rule = add(project)
    run = scalar(project)
    (event,) = evaluate(run.id)
    assert (event.rule, event.title, event.onset_step, event.step) == (rule, "mine", 50, 52)
    assert event.message == "grad_norm is 20, above 10, since step 50."
    assert [series["name"] for series in event.evidence["series"]] == ["grad_norm", "loss"]
    event.refresh_from_db()
    assert event.state == "resolved" and event.resolved_step == 69


def test_follows_the_tensors_that_match_a_pattern(project: Project) -> None:
    add(project, statistic="overflow_rate", tensors="blocks.*.input", value=0.5)
    run = make_run(project)
    saturated = np.zeros((100, 4))
    saturated[20:] = [90.0, 100.0, 80.0, 100.0]
    numbers = {"saturated": saturated, "nonfinite": np.zeros((100, 4)), "numel": np.full((100, 4), 100.0)}
    Recorder(run=run, tensors=TENSORS).rows(STEPS, {"loss": np.ones(100)}, numbers)
    (event,) = evaluate(run.id)
    names = [tensor["name"] for tensor in event.evidence["tensors"]]
    assert names == ["blocks.0.up.input", "blocks.1.up.input"] and event.onset_step == 21
    assert event.evidence["series"][0]["tensor"] == "blocks.0.up.input"


def test_a_rule_of_one_run_judges_only_this_run(project: Project) -> None:
    run, other = scalar(project), scalar(project)
    add(project, run=str(run.id))
    assert len(evaluate(run.id)) == 1 and evaluate(other.id) == []


def test_a_built_in_rule_of_a_run_replaces_the_projects(project: Project) -> None:
    run, other = (make_run(project) for _ in range(2))
    Rule.objects.filter(kind="loss_not_finite").update(enabled=True)
    rule_store.save(
        rule_documents.parse(project, {"kind": "loss_not_finite", "run": str(run.id), "severity": "warning"})
    )
    for each in (run, other):
        Recorder(run=each).rows(STEPS, {"loss": np.where(STEPS < 50, 1.0, np.nan)})
    assert [event.severity for event in evaluate(run.id)] == ["warning"]
    assert [event.severity for event in evaluate(other.id)] == ["critical"]


def test_a_changed_rule_starts_again_and_resolves_its_alert(project: Project) -> None:
    rule = add(project)
    run = scalar(project, last=1000)
    (event,) = evaluate(run.id)
    draft = rule_documents.parse(project, rule_documents.document_of(rule) | {"value": 50})
    rule_store.save(draft, rule)
    event.refresh_from_db()
    assert event.state == "resolved" and event.history.last().text == "The rule was changed."  # type: ignore[union-attr]
    Recorder(run=run, attempt=1).rows(STEPS + 100, {"loss": np.ones(100), "grad_norm": np.full(100, 20.0)})
    assert evaluate(run.id) == []


def test_an_alert_of_a_former_definition_ends_with_the_next_rows(project: Project) -> None:
    """Also if the rule was changed while its run was evaluated, so that nobody resolved the alert."""
    rule = add(project)
    run = make_run(project)
    recorder = Recorder(run=run)
    recorder.rows(STEPS, {"loss": np.ones(100), "grad_norm": np.full(100, 20.0)})
    (event,) = evaluate(run.id)
    Rule.objects.filter(pk=rule.pk).update(parameters=rule.parameters | {"value": 50.0})
    recorder.rows(STEPS + 100, {"loss": np.ones(100), "grad_norm": np.full(100, 20.0)})
    assert evaluate(run.id) == []
    event.refresh_from_db()
    assert event.state == "resolved" and event.seen_by == []


def test_a_built_in_rule_of_the_project_stays_one(project: Project) -> None:
    """Else no other run would have a rule of this kind."""
    rule = Rule.objects.get(project=project, kind="loss_spike")
    run = make_run(project)
    draft = rule_documents.parse(project, rule_documents.document_of(rule) | {"run": str(run.id)})
    with pytest.raises(rule_documents.RuleDocumentError, match="keeps its run"):
        rule_store.save(draft, rule)


def test_a_changed_severity_keeps_its_alert(project: Project) -> None:
    rule = add(project)
    (event,) = evaluate(scalar(project, last=1000).id)
    draft = rule_documents.parse(project, rule_documents.document_of(rule) | {"severity": "critical"})
    rule_store.save(draft, rule)
    event.refresh_from_db()
    assert event.state == "open"


def test_alerts_outlive_their_rule(project: Project) -> None:
    rule = add(project)
    (event,) = evaluate(scalar(project, last=1000).id)
    rule_store.remove(rule)
    event.refresh_from_db()
    assert event.rule is None and event.title == "mine" and event.state == "resolved"
    assert not Alert.objects.exclude(seen_by=[]).exists()


def test_two_rules_about_the_same_step_open_two_alerts(project: Project) -> None:
    add(project)
    add(project, name="other", value=15)
    assert {event.title for event in evaluate(scalar(project).id)} == {"mine", "other"}


def test_a_built_in_rule_of_a_project_cannot_be_removed(project: Project) -> None:
    rule = Rule.objects.filter(project=project).first()
    assert rule is not None
    with pytest.raises(rule_documents.RuleDocumentError, match="Switch it off"):
        rule_store.remove(rule)


def test_a_changed_rule_holds_from_the_next_evaluation_on(project: Project) -> None:
    """Processes remember the rules that they have read, and notice every change."""
    rule = add(project)
    assert [event.kind for event in evaluate(scalar(project).id)] == ["threshold"]
    Rule.objects.filter(pk=rule.pk).update(parameters={**rule.parameters, "value": 30.0})
    assert evaluate(scalar(project).id) == []
    Rule.objects.filter(pk=rule.pk).update(parameters=rule.parameters)
    assert len(evaluate(scalar(project).id)) == 1
    Rule.objects.filter(pk=rule.pk).update(enabled=False)
    assert evaluate(scalar(project).id) == []
    other = add(project, name="another")
    (event,) = evaluate(scalar(project).id)
    assert event.rule == other
    other.delete()
    assert evaluate(scalar(project).id) == []


def test_unchanged_rules_are_not_read_again(project: Project) -> None:
    add(project)
    run = scalar(project)
    custom_rules.rules_of(run)
    with CaptureQueriesContext(connection) as queries:
        assert [rule.name for rule in custom_rules.rules_of(run)] == ["mine"]
    assert len(queries) == 0
