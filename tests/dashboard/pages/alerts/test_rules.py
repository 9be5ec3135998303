"""The pages of rules: in words, the form, and trying a rule on past runs."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.alerting import make_hook
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html
from django.template.loader import render_to_string
from django.utils import timezone

from fp8scope_dashboard.alerts.custom_rules import documents as rule_documents
from fp8scope_dashboard.alerts.custom_rules import trials
from fp8scope_dashboard.alerts.models import Alert, Rule, RuleTrial
from fp8scope_dashboard.alerts.rules import KINDS
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.pages.alerts.rule_words import LABELS, amount, label_of
from fp8scope_dashboard.pages.alerts.rules import RUNS_OFFERED
from fp8scope_dashboard.runs.models import Run

FORM = {
    "name": "Late outliers", "statistic": "amax", "tensors": "blocks.*.input",
    "condition": "changes_by_factor", "value": "8", "points": "20", "share": "50", "window": "2000",
    "recover": "5", "severity": "critical", "enabled": "1", "action": "fallback",
}  # fmt: skip


def save(visitor: Visitor, rest: str = "rules/save", **fields: Any) -> Any:
    return visitor.client.post(visitor.address(rest), FORM | fields, follow=True)


def test_it_works(admin: Visitor) -> None:
    make_hook(admin.project, "on-call")
    answer = save(
        admin, quiet="1", quiet_from="22:00", quiet_to="07:00", quiet_zone="Europe/Berlin",
        critical_breaks_through="1", escalate="1", after_minutes="15", channels=["on-call"],
    )  # fmt: skip
    page = answer.content.decode()
    assert "Saved the rule “Late outliers”" in page
    rule = Rule.objects.get(name="Late outliers")
    assert rule_documents.document_of(rule) == {
        "name": "Late outliers", "statistic": "amax", "tensors": "blocks.*.input",
        "condition": "changes_by_factor", "value": 8.0, "points": 20, "share": 0.5, "window": 2000,
        "recover": 5, "severity": "critical", "enabled": True, "action": "fallback", "channels": ["on-call"],
        "quiet": {"from": "22:00", "to": "07:00", "zone": "Europe/Berlin", "critical_breaks_through": True},
        "escalate": {"after_minutes": 15, "channels": []},
    }  # fmt: skip
    words = "amax of blocks.*.input changes by a factor of 8 against the average of 2\u202f000 points"
    assert f"{words}, in 50 % of 20 points." in page
    assert "Quiet from 22:00 to 07:00 (Europe/Berlin)." in page and "Escalates after 15 min." in page


def test_the_form_saves_what_it_shows(admin: Visitor) -> None:
    """Every rule: fill the form, post its fields unchanged, and nothing changes."""
    save(admin)
    for rule in Rule.objects.filter(project=admin.project):
        before = rule_documents.document_of(rule)
        page = html(admin, f"rules/{rule.pk}/")
        assert f'action="{admin.address(f"rules/{rule.pk}/save")}"' in page
        answer = admin.client.post(admin.address(f"rules/{rule.pk}/save"), fields_of(page), follow=True)
        assert "Saved the rule" in answer.content.decode(), rule.title
        rule.refresh_from_db()
        assert rule_documents.document_of(rule) == before


def fields_of(page: str) -> dict[str, list[str]]:
    """What a browser posts for the form in this page."""
    form = page.partition('<form class="stack stack--wide"')[2].partition("</form>")[0]
    fields: dict[str, list[str]] = {}
    for tag in re.findall(r"<input [^>]*>", form):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if attributes.get("type") == "checkbox" and " checked" not in tag:
            continue
        fields.setdefault(attributes["name"], []).append(attributes.get("value", ""))
    for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', form, flags=re.DOTALL):
        chosen = (
            re.findall(r'value="([^"]*)" selected', options) or re.findall(r'value="([^"]*)"', options)[:1]
        )
        fields[name] = chosen
    return fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "Name: must be a text"),
        ({"value": "much"}, "Value: must be a number"),
        ({"value": "1"}, "Value: A factor must be above 1"),
        ({"points": "0"}, "Points in a row: must be a whole number"),
        ({"share": "nan"}, "Share: must be a number"),
        ({"condition": "x"}, "Condition: must be one of"),
        (
            {"quiet": "1", "quiet_from": "22:00", "quiet_to": "07:00", "quiet_zone": "Mars"},
            "Time zone: must be",
        ),
        ({"quiet": "1", "quiet_from": "22:00", "quiet_to": ""}, "End of the quiet hours: must be a time"),
        ({"escalate": "1", "after_minutes": ""}, "Minutes until escalation: must be"),
        ({"tensors": "", "condition": "above"}, "Only a rule about tensors can fall back"),
        ({"run": "nonsense"}, "Run: must be the id of a run"),
        ({"kind": "nonsense"}, "must be one of"),
    ],
)
def test_says_what_is_wrong_and_keeps_what_was_entered(
    admin: Visitor, fields: dict[str, str], message: str
) -> None:
    answer = save(admin, **fields)
    page = answer.content.decode()
    assert answer.status_code == 422 and message in page
    if "kind" not in fields:
        assert 'value="blocks.*.input"' in page or fields.get("tensors") == ""
    assert not Rule.objects.filter(name="Late outliers").exists()


def test_refuses_a_second_rule_of_the_same_name(admin: Visitor) -> None:
    save(admin)
    answer = save(admin)
    assert (
        answer.status_code == 422 and "Another rule of the project has this name" in answer.content.decode()
    )


def test_a_built_in_rule_of_one_run(admin: Visitor) -> None:
    run = make_run(admin.project, "special")
    page = html(admin, f"rules/new?kind=loss_spike&run={run.id}")
    assert "Robust standard deviations" in page and "Deviations above the past" in page
    answer = admin.client.post(
        admin.address("rules/save"), fields_of(page) | {"run": [str(run.id)]}, follow=True
    )
    assert "only special" in answer.content.decode()
    rule = Rule.objects.get(run=run)
    answer = admin.client.post(admin.address(f"rules/{rule.pk}/remove"), follow=True)
    assert "Removed the rule" in answer.content.decode() and not Rule.objects.filter(run=run).exists()


def test_a_removed_rule_can_be_restored(admin: Visitor) -> None:
    save(admin)
    rule = Rule.objects.get(name="Late outliers")
    before = rule_documents.document_of(rule)
    page = admin.client.post(admin.address(f"rules/{rule.pk}/remove"), follow=True).content.decode()
    assert "Restore the rule “Late outliers”?" in page and not Rule.objects.filter(name=rule.name).exists()
    (address,) = re.findall(r'<form class="notice row undo" method="post" action="([^"]*)"', page)
    assert (
        "Undone"
        in admin.client.post(address, {"next": admin.address("rules/")}, follow=True).content.decode()
    )
    assert rule_documents.document_of(Rule.objects.get(name="Late outliers")) == before
    assert "Restore the rule" not in html(admin, "rules/"), "it is offered once"


@pytest.mark.parametrize("document", ["{", "[]", "3", "[" * 100_000, '{"kind": "nonsense"}'])
def test_refuses_a_document_that_is_no_rule(admin: Visitor, document: str) -> None:
    before = Rule.objects.count()
    assert admin.client.post(admin.address("rules/save"), {"document": document}).status_code == 422
    assert Rule.objects.count() == before


def test_a_rule_of_an_old_run_keeps_it(admin: Visitor) -> None:
    """The form offers the latest runs, and this one."""
    run = make_run(admin.project, "the oldest")
    save(admin, run=str(run.id))
    for number in range(31):
        make_run(admin.project, f"run {number}")
    rule = Rule.objects.get(name="Late outliers")
    page = html(admin, f"rules/{rule.pk}/")
    admin.client.post(admin.address(f"rules/{rule.pk}/save"), fields_of(page))
    rule.refresh_from_db()
    assert rule.run == run


def test_a_trial_whose_worker_was_killed_ends(admin: Visitor) -> None:
    trial = RuleTrial.objects.create(project=admin.project, document={}, state="running")
    assert "hx-get" in html(admin, f"rules/try/{trial.pk}")
    RuleTrial.objects.update(created_at=timezone.now() - timedelta(minutes=31))
    page = html(admin, f"rules/try/{trial.pk}")
    assert "did not finish" in page and "hx-get" not in page


def test_no_field_has_the_name_of_a_variable(admin: Visitor) -> None:
    for kind in KINDS.values():
        labels = [label_of(name, kind.name) for name in kind.parameters]
        # Each has words of its own, and no two fields of a form have the same.
        assert len(set(labels)) == len(labels)
        assert set(kind.parameters) <= LABELS.keys()
    for rule in Rule.objects.filter(project=admin.project):
        page = html(admin, f"rules/{rule.pk}/")
        assert not re.search(r"<span>(Z|Span|Sigmas|z)</span>", page)


def test_a_viewer_can_read_but_not_save(viewer: Visitor) -> None:
    rule = Rule.objects.filter(project=viewer.project).first()
    assert rule is not None
    assert "New rule" not in html(viewer, "rules/")
    page = html(viewer, f"rules/{rule.pk}/")
    assert "Save</button>" not in page and page.count("disabled") >= 2


def test_trying_a_rule_shows_what_it_would_have_reported(admin: Visitor, seeded: Seeded) -> None:
    runs = [str(run.id) for run in (seeded.faulty, seeded.healthy)]
    form = {
        "name": "x",
        "statistic": "loss",
        "condition": "above",
        "value": "3.0",
        "points": "5",
        "runs": runs,
    }
    form |= {"severity": "warning", "enabled": "1"}
    before = Alert.objects.count()
    answer = admin.client.post(admin.address("rules/try"), form)
    trial = RuleTrial.objects.get()
    # Without a worker, it waits.
    assert f"rules/try/{trial.pk}" in answer.content.decode()
    trials.carry_out(trial.pk)
    page = html(admin, f"rules/try/{trial.pk}")
    assert "loss is" in page and "hx-get" not in page
    by_run = {entry["run"]: entry["count"] for entry in RuleTrial.objects.get().result}
    assert by_run[runs[0]] >= 1
    assert Alert.objects.count() == before and not Rule.objects.filter(name="x").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runs": []}, "Choose 1 to 20 runs"),
        ({"value": ""}, "Value: is missing"),
        ({"kind": "run_silent", "action": ""}, "cannot be tried: it depends on when the run was heard from"),
    ],
)
def test_says_why_a_rule_cannot_be_tried(admin: Visitor, fields: dict[str, Any], message: str) -> None:
    run = make_run(admin.project)
    answer = admin.client.post(admin.address("rules/try"), FORM | {"runs": [str(run.id)]} | fields)
    assert message in answer.content.decode() and not RuleTrial.objects.exists()


def test_the_page_of_a_rule_says_that_it_cannot_be_tried(admin: Visitor) -> None:
    run = make_run(admin.project)
    page = html(admin, f"rules/new?kind=run_silent&run={run.id}")
    assert "it depends on when the run was heard from" in page and "rules/try" not in page


def test_a_trial_reports_what_the_evaluation_reports(admin: Visitor) -> None:
    """The same rows with the same rule: the alerts that were opened are those that a trial names."""
    loss = 2.0 + np.random.default_rng(0).normal(0, 0.01, 400)
    loss[100:104] = np.nan
    loss[300:] = np.nan
    run = make_run(admin.project)
    Recorder(run=run).rows(np.arange(400), {"loss": loss}, rows_per_batch=37)
    evaluate(run.id)
    rule = Rule.objects.get(project=admin.project, kind="loss_not_finite")
    opened = list(
        Alert.objects.filter(run=run, rule=rule)
        .order_by("id")
        .values_list("onset_step", "step", "resolved_step")
    )
    tried = [(each.onset_step, each.step, each.ended_step) for each in trials.replay(run, rule)]
    assert tried == opened and len(tried) == 2


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("saturation_rate", 0.992, "99.2 %"),
        ("scale_stale", 10.0, "a factor of 1024"),
        ("kurtosis_growth", 3.0, "a factor of 8"),
        ("memory_creep", 3.0 * 2**20, "3 MiB"),
        ("loss_divergence", 2.971, "2.971"),
        ("loss_divergence", None, ""),
    ],
)
def test_an_amount_has_its_unit(kind: str, value: float | None, shown: str) -> None:
    assert amount(kind, value) == shown


def test_the_form_offers_the_run_that_it_is_asked_for(admin: Visitor) -> None:
    """However old it is; the link is on the run's page."""
    run = make_run(admin.project, "the old run")
    Run.objects.update(created_at=timezone.now() - timedelta(days=300))
    for number in range(RUNS_OFFERED):
        make_run(admin.project, f"newer {number}")
    chosen = f'<option value="{run.pk}" selected>the old run</option>'
    assert chosen in html(admin, f"rules/new?run={run.pk}")
    assert "the old run" not in html(admin, "rules/new")
    assert f'action="{admin.address("rules/save")}"' in html(admin, "rules/new")
    context = {"project": admin.project, "run": run, "is_admin": True}
    link = render_to_string("pages/alerts/_new_rule_link.html", context)
    assert f'href="{admin.address("rules/new")}?run={run.pk}"' in link
    assert "href" not in render_to_string("pages/alerts/_new_rule_link.html", {**context, "is_admin": False})


def test_a_trial_says_how_a_run_ended(admin: Visitor) -> None:
    project = admin.project
    run = make_run(project, state="failed", error="Traceback\nValueError: no data", last_step=70)
    (alert,) = trials.replay(run, Rule(project=project, kind="run_failed", parameters={}))
    assert (alert.onset_step, alert.ended_step) == (70, None) and "ValueError: no data" in alert.message
    assert trials.replay(run, Rule(project=project, kind="run_finished", parameters={})) == []
