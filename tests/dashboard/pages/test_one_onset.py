"""One fault, one onset: every page, message and answer of the API names the same step and the same tensor."""

from __future__ import annotations

import pytest
from dashboard.helpers.alerting import make_hook
from dashboard.helpers.injected_faults import FAULTS, Fault, record
from dashboard.helpers.named_onsets import (
    first_column,
    of_alert,
    of_diagnosis,
    of_ranking,
    of_run,
    of_strip,
    said,
    text_of,
)
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.tensor_onsets import default_limit
from fp8scope_dashboard.diagnosis.services import diagnose
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db
LOSS_KINDS = ("above_baseline", "loss_divergence")
# Statistics that a BF16 run has, too.
COMPARED = ("overflow_rate", "saturation_rate", "underflow_rate", "nonfinite_rate", "amax")


def judged(admin: Visitor, fault: Fault) -> Run:
    """The run with the fault, after all jobs that look at it."""
    make_hook(admin.project)
    run = record(admin.project, fault)
    evaluate(run.id)
    compare(run.id)
    run.refresh_from_db()
    diagnose(run.id)
    return run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_place_names_the_tensor_and_the_step(admin: Visitor, fault: Fault) -> None:
    run = judged(admin, fault)
    event = Alert.objects.select_related("run__project").get(run=run, kind=fault.kind)
    named = [
        *of_alert(admin, event),
        *of_run(admin, run, fault.kind, event.title),
        *of_diagnosis(admin, run),
        *of_ranking(admin, run, fault.statistic),
        *[entry for entry in of_strip(admin, run) if not entry[0].startswith("strip: loss")],
    ]
    assert {place for place, words, _ in named if words != fault.in_words} == set(), named
    assert {place for place, _, tensor in named if tensor not in (fault.tensor, None)} == set(), named
    assert len(named) >= 9 and any(place == "ranking" for place, _, _ in named) == fault.is_ranked


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.is_ranked], ids=lambda fault: fault.name)
def test_the_maps_show_it_first_in_the_same_steps(admin: Visitor, fault: Fault) -> None:
    run = record(admin.project, fault)
    low, high = first_column(admin, run, fault.statistic, fault.tensor, default_limit(fault.statistic))
    earliest = fault.step if fault.after is None else fault.after + 1
    assert low <= fault.step and high >= earliest
    if fault.statistic in COMPARED and not fault.without:
        baseline = Run.objects.get(project=run.project, name="bf16")
        query = {"runs": [str(baseline.pk), str(run.pk)], "statistic": fault.statistic}
        answer = admin.client.get(admin.address("compare/figures/tensors.json"), query).json()
        differing = answer["figure"]["layout"]["meta"]["names"]
        # Of an amax, every tensor differs by chance.
        assert differing[0] == fault.tensor or (fault.tensor in differing and len(differing) == 2)


@pytest.mark.parametrize("has_baseline", [True, False])
def test_every_place_names_the_step_from_which_the_loss_rises(admin: Visitor, has_baseline: bool) -> None:
    (fault,) = (fault for fault in FAULTS if fault.loss_step is not None)
    make_hook(admin.project)
    run = record(admin.project, fault)
    if not has_baseline:
        Run.objects.filter(pk=run.pk).update(baseline="")
    evaluate(run.id)
    compare(run.id)
    run.refresh_from_db()
    diagnosis = diagnose(run.id)
    assert diagnosis is not None
    events = Alert.objects.filter(run=run, kind__in=LOSS_KINDS).select_related("run__project")
    assert {event.kind for event in events} == (set(LOSS_KINDS) if has_baseline else {"loss_divergence"})
    onset = events[0].onset_in_words
    assert abs(int(onset) - (fault.loss_step or 0)) <= 40
    named = [
        entry
        for event in events
        for entry in (*of_alert(admin, event), *of_run(admin, run, event.kind, event.title))
    ]
    named += [entry for entry in of_strip(admin, run) if entry[0].startswith("strip: loss")]
    (reference,) = (each for each in diagnosis.result["findings"] if each["step"] == "reference")
    named += [
        ("diagnosis", said(reference["sentence"], "rises by [^.]*? at step "), None),
        ("onset of the diagnosis", str(reference["onset"]), None),
    ]
    if has_baseline:
        verdict = text_of(html(admin, f"compare/?runs={run.pk}"))
        named.append(("verdict", said(verdict, "Since about step "), None))
    assert {place for place, words, _ in named if words != onset} == set(), named


def test_a_report_and_a_run_s_page_name_the_same_steps(admin: Visitor) -> None:
    (fault,) = (fault for fault in FAULTS if fault.missing is not None)
    run = judged(admin, fault)
    data = {"title": "What happened", "parts": ["alerts"], "runs": [str(run.pk)]}
    page = admin.client.post(admin.address("reports/new"), data, follow=True).content.decode()
    assert f">{fault.in_words}</td>" in page and f"since step {fault.in_words}: " in page
