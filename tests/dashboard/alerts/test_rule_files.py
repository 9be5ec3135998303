"""Rules as code: what is exported can be applied, and errors name the line and the field."""

from __future__ import annotations

import random
import string

import pytest
from dashboard.helpers.alerting import make_hook

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.custom_rules import files as rule_files
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.models import Rule

pytestmark = pytest.mark.django_db

FILE = """\
version: 1
rules:
  - kind: loss_spike
    enabled: false
    parameters: {z: 8}
  - name: Gradient norm
    statistic: grad_norm
    condition: rises_by
    value: 5
    points: 4
    share: 0.5
    severity: critical
    channels: [on-call]
    quiet: {from: 22:00, to: "07:00", zone: Europe/Berlin}
    action: checkpoint
    escalate:
      after_minutes: 15
      channels: [phone]
  - name: Late outliers
    statistic: amax
    tensors: blocks.*.mlp.down.input
    condition: changes_by_factor
    value: 8
    window: 2000
    action: fallback
"""


@pytest.fixture
def project(db: None) -> Project:
    project = create_project("research", "Research")
    for name in ("on-call", "phone"):
        make_hook(project, name)
    return project


def apply(project: Project, text: str, *, prune: bool = False, check: bool = False) -> dict[str, str]:
    changes = rule_store.apply(project, rule_files.read(project, text), prune=prune, check=check)
    return {change.title: change.what for change in changes}


def test_it_works(project: Project) -> None:
    assert apply(project, FILE) == {
        "Loss spike": "changed", "Gradient norm": "created", "Late outliers": "created"
    }  # fmt: skip
    norm = Rule.objects.get(name="Gradient norm")
    assert f"{norm.quiet_from:%H:%M}-{norm.quiet_to:%H:%M} {norm.quiet_zone}" == "22:00-07:00 Europe/Berlin"
    assert norm.escalation_channels.get().name == "phone" and norm.channels.get().name == "on-call"
    assert not Rule.objects.get(kind="loss_spike").enabled
    # Again, and what it exports, changes nothing.
    assert set(apply(project, FILE).values()) == {"unchanged"}
    exported = rule_files.export(rule_store.rules_in(project))
    assert set(apply(project, exported, prune=True).values()) == {"unchanged"}


def test_an_export_moves_rules_to_another_project(project: Project) -> None:
    apply(project, FILE)
    other = create_project("other", "Other")
    for name in ("on-call", "phone"):
        make_hook(other, name)
    text = rule_files.export(rule_store.rules_in(project))
    apply(other, text)
    assert rule_files.export(rule_store.rules_in(other)) == text


def test_a_check_changes_nothing(project: Project) -> None:
    before = rule_files.export(rule_store.rules_in(project))
    (change, *_) = rule_store.apply(project, rule_files.read(project, FILE), check=True)
    before_z, after_z = (parameters["z"] for parameters in change.fields.pop("parameters"))
    assert (before_z, after_z) == (6.0, 8.0) and change.fields == {"enabled": (True, False)}
    assert rule_files.export(rule_store.rules_in(project)) == before


def test_removes_only_with_prune_and_never_a_built_in_rule(project: Project) -> None:
    apply(project, FILE)
    count = Rule.objects.filter(project=project).count()
    rest = "version: 1\nrules: []\n"
    assert apply(project, rest) == {} and Rule.objects.filter(project=project).count() == count
    assert apply(project, rest, prune=True) == {"Gradient norm": "removed", "Late outliers": "removed"}
    assert Rule.objects.filter(project=project).count() == count - 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("version: 1", "version: 2", r"line 1: version: must be 1"),
        ("version: 1", "versoin: 1", r"line 1: versoin: unknown"),
        ("value: 5", "valeu: 5", r"line 9: valeu: unknown; known here: name, statistic"),
        ("value: 5", "value: much", r"line 9: value: must be a number"),
        ("    value: 5\n", "", r"line 6: value: is missing"),
        ("points: 4", "points: 4.5", r"line 10: points: must be a whole number from 1"),
        ("share: 0.5", "share: .inf", r"line 11: share: must be a number"),
        ("severity: critical", "severity: bad", r"line 12: severity: must be one of: warning, critical"),
        ("[on-call]", "[nobody]", r"line 13: channels: there is no channel 'nobody'; there are: on"),
        ("Europe/Berlin", "Mars/Olympus", r"line 14: quiet.zone: must be the name of a time zone"),
        ('"07:00"', '"25:00"', r"line 14: quiet.to: must be a time"),
        ("action: checkpoint", "action: fallback", r"line 15: action: Only a rule about tensors"),
        ("after_minutes: 15", "after_minutes: 0", r"line 17: escalate.after_minutes: must be"),
        ("condition: changes_by_factor", "condition: not_finite", r"line 22: condition: For tensors"),
        ("value: 8\n", "value: 1\n", r"line 23: value: A factor must be above 1"),
        ("{z: 8}", "{zz: 8}", r"line 5: parameters.zz: unknown; loss_spike takes: z, fraction, points"),
        ("{z: 8}", "{z: 1}", r"line 5: parameters.z: must be a number from 3"),
        ("kind: loss_spike", "kind: threshold", r"line 3: kind: must be one of: loss_not_finite"),
        ("name: Late outliers", "name: Gradient norm", r"line 19: This rule is in the file twice"),
        ("points: 4", "value: 6", r"line 10: value is there twice"),
        ("name: Late outliers", "name: &a Late\n    run: *a", r"line 19: Anchors and aliases"),
        ("name: Late outliers", "name: [", r"line 2\d: "),
        ("name: Late outliers", "name: !!python/name:os.system x", r"line 19: The tag !!python/name:os"),
        ("name: Late outliers", "name: !mine Late", r"line 19: The tag !mine is not supported"),
        ("{z: 8}", "!!set {z}", r"line 5: The tag !!set is not supported"),
        ("name: Late outliers", "name: 2026-01-01", r"line 19: Put the date in quotes"),
        ("version: 1\n", "version: 1\n---\n", r"expected a single document"),
        ("name: Late outliers", f"name: {'1' * 5000}", r"not valid YAML|must be a text"),
        ("name: Late outliers", "name: ''", r"line 19: name: must be a text of 1"),
        ("action: fallback", "run: 1234", r"line 25: run: must be the id of a run"),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_what_to_do(project: Project, before: str, after: str, message: str) -> None:
    text = FILE.replace(before, after, 1)
    assert text != FILE
    with pytest.raises(rule_files.RuleFileError, match=message):
        apply(project, text)
    assert Rule.objects.filter(kind="threshold").count() == 0


@pytest.mark.parametrize("text", ["", "[]", "a", "{" * 3000, "x" * 300_000, "\0", "version: 1\nrules: {}"])
def test_refuses_what_is_no_list_of_rules(project: Project, text: str) -> None:
    with pytest.raises(rule_files.RuleFileError):
        apply(project, text)


@pytest.mark.parametrize(("written", "value"), [("1e3", 1000.0), ("5E-3", 0.005), ("+2.5e1", 25.0)])
def test_numbers_may_have_an_exponent_without_a_point(project: Project, written: str, value: float) -> None:
    apply(project, FILE.replace("value: 5", f"value: {written}", 1))
    assert Rule.objects.get(name="Gradient norm").parameters["value"] == value


def test_a_name_that_looks_like_a_number_stays_a_name(project: Project) -> None:
    apply(project, FILE.replace("name: Gradient norm", 'name: "1e3"', 1))
    exported = rule_files.export(rule_store.rules_in(project))
    assert set(apply(project, exported).values()) == {"unchanged"}


@pytest.mark.parametrize("bracket", ["[", "{", "- "])
def test_nested_brackets_are_refused_before_they_are_read(project: Project, bracket: str) -> None:
    with pytest.raises(rule_files.RuleFileError, match="line 2: The file is nested too deeply"):
        rule_files.read(project, f"rules:\n  - {bracket * 5000}")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("- &a x\n" + "- *a\n" * 30_000, "line 3: Anchors and aliases"),
        ("- 1\n" * 60_000, r"line 49998: The file has more than 50,000 values"),
    ],
)
def test_a_large_tree_is_refused_before_it_is_built(project: Project, rules: str, message: str) -> None:
    """The bound ends the reading: an error behind it, which the parser would report, is not reached."""
    with pytest.raises(rule_files.RuleFileError, match=message):
        rule_files.read(project, f"version: 1\nrules:\n{rules}\nbroken: [")


def test_damaged_files_are_refused_or_read(project: Project) -> None:
    """No damage raises anything but the error for people."""
    generator = random.Random(0)
    for _ in range(150):
        text = list(FILE)
        for _ in range(generator.randint(1, 6)):
            text[generator.randrange(len(text))] = generator.choice(string.printable)
        try:
            rule_files.read(project, "".join(text))
        except rule_files.RuleFileError as error:
            assert str(error).startswith("line ")
