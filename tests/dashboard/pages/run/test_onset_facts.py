"""The facts of the onset strip, as they are stored."""

from __future__ import annotations

import uuid
from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded, seed_project
from dashboard.helpers.visitors import Visitor
from django.utils import timezone

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.analysis.verdict_coverage import standing_now
from fp8scope_dashboard.control.models import Command, CommandResult, Report
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.pages.run.onset_facts import facts_of, last_line
from fp8scope_dashboard.pages.run.onset_strip import ChangeFact, StartFact, strip_of
from fp8scope_dashboard.runs.models import Run, Writer


def test_it_works(viewer: Visitor, seeded: Seeded) -> None:
    """The seeded run has frozen scales, leaves BF16 from step 90 on, and is NaN from 127 on."""
    strip = strip_of(facts_of(seeded.faulty, standing_now(seeded.faulty)))
    happened = {onset.title: onset.step for onset in strip.shown}
    assert happened["loss is not finite"] == 127
    (left,) = [step for title, step in happened.items() if title.startswith("loss leaves BF16")]
    assert 90 <= left <= 127
    assert happened["scale of input of 6 layers freezes"] < 127
    assert list(happened.values()) == sorted(happened.values())
    answer = viewer.client.get(viewer.address(f"runs/{seeded.faulty.id}/"))
    assert "loss is not finite" in answer.content.decode()


def test_what_another_rule_found_about_the_tensors_has_its_own_onset(admin: Visitor) -> None:
    """Frozen scales are one alert with the saturation that follows: the strip names both."""
    run = seed_project(admin.project, 300).faulty
    frozen = Alert.objects.get(run=run, kind="scale_frozen")
    assert [each["kind"] for each in frozen.evidence["further"]] == ["saturation_rate", "saturation_rise"]
    strip = strip_of(facts_of(run, standing_now(run)))
    (saturated,) = [onset for onset in strip.shown if onset.title.endswith("overflow")]
    assert frozen.onset_step < saturated.step == frozen.evidence["further"][0]["onset_step"]
    assert "mlp.down.input" in saturated.title + saturated.detail


def test_a_healthy_run_is_calm(seeded: Seeded) -> None:
    strip = strip_of(facts_of(seeded.healthy, standing_now(seeded.healthy)))
    assert not strip.shown and "up to step 149" in strip.calm


def test_reads_an_alert(admin: Visitor) -> None:
    run = make_run(admin.project, "r", precision="fp8")
    tensors = [
        {"name": "a.input", "onset_step": 30, "after_step": 29},
        {"name": "b.input", "onset_step": 20, "after_step": 10},
    ]
    event = Alert.objects.create(
        run=run,
        kind="saturation_rate",
        severity="warning",
        onset_step=20,
        step=40,
        message="2 tensors saturate.",
        evidence={"tensors": tensors, "tensors_over": 2},
        state="resolved",
    )
    (alert,) = facts_of(run, "running").alerts
    assert (alert.onset, alert.after, alert.tensors, alert.tensors_over) == (
        20,
        10,
        ("a.input", "b.input"),
        2,
    )
    assert alert.address == f"/p/research/alerts/{event.pk}/" and alert.is_resolved
    (onset,) = strip_of(facts_of(run, "running")).shown
    assert onset.steps == "11–20" and onset.title == "input of 2 layers overflow"


def test_reads_the_diagnosis(admin: Visitor) -> None:
    run = make_run(admin.project, "r", precision="fp8")
    Diagnosis.objects.create(
        run=run, outcome="cause", cause="frozen_scale", sentence="Frozen.", result={"onset": 17}, inputs=""
    )
    fact = facts_of(run, "running").diagnosis
    assert fact is not None and (fact.cause, fact.onset, fact.outcome) == ("Frozen scale", 17, "cause")
    Diagnosis.objects.update(cause="", result={"onset": None})
    run.refresh_from_db()
    assert facts_of(Run.objects.get(pk=run.pk), "running").diagnosis is None


def test_reads_changes_of_the_run(admin: Visitor) -> None:
    run = make_run(admin.project, "r", precision="fp8")
    writer = uuid.uuid4()
    for seq, (kind, step, document) in enumerate(
        [
            ("annotation", 10, {"name": "fallback", "text": "1 layer to BF16: a", "why": "An alert."}),
            ("annotation", 12, {"name": "note", "text": "x" * 500, "why": ""}),
            ("annotation", 18, {"name": "incident", "text": "kept", "incident": {"target": 14}}),
            ("reference", 30, {"verdict": "over", "delta": 0.03, "bf16": [1, 2]}),
            ("reference", 20, {"verdict": "within", "delta": 0.0, "bf16": [1, 2]}),
        ]
    ):
        Report.objects.create(run=run, writer=writer, seq=seq, kind=kind, step=step, document=document)
    for state, step in (("done", 11), ("refused", 25), ("failed", 40)):
        command = Command.objects.create(
            run=run,
            kind="checkpoint" if step > 11 else "fallback",
            arguments={"patterns": ["a"], "precision": "bf16"},
            expires_at=timezone.now() + timedelta(minutes=1),
        )
        CommandResult.objects.create(command=command, writer=writer, state=state, step=step)
    changes = facts_of(run, "running").changes
    assert ChangeFact(step=10, kind="mark", text="1 layer to BF16: a", detail="An alert.") in changes
    assert {(change.step, change.kind) for change in changes} == {
        (10, "mark"),
        (12, "note"),
        (14, "incident"),
        (30, "window"),
        (11, "fallback"),
        # A command that is refused changes nothing.
        (40, "checkpoint"),
    }
    assert max(len(change.text) for change in changes) <= 60
    shown = [onset.title for onset in strip_of(facts_of(run, "running")).shown]
    assert "1 layer to BF16: a" in shown and "command: change precision" not in shown


def test_reads_the_starts(admin: Visitor) -> None:
    run = make_run(admin.project, "r")
    for attempt, first, last in ((0, 1, 310), (1, 250, 320), (1, 251, 330), (2, 331, None)):
        Writer.objects.create(run=run, uuid=uuid.uuid4(), attempt=attempt, first_step=first, last_step=last)
    Writer.objects.create(run=run, uuid=uuid.uuid4(), attempt=3)
    assert facts_of(run, "running").starts == [StartFact(2, 250, 310), StartFact(3, 331, 330)]


@pytest.mark.parametrize("at", [0, 700, 4_999])
def test_finds_the_first_loss_that_is_not_finite(admin: Visitor, at: int) -> None:
    run = make_run(admin.project, "r")
    loss = np.full(5_000, 2.0)
    loss[at] = np.inf
    Recorder(run=run).rows(np.arange(5_000), {"loss": loss}, rows_per_batch=5_000)
    assert facts_of(run, "running").nonfinite_step == at


def test_the_end_of_a_failed_run(admin: Visitor) -> None:
    run = make_run(admin.project, "r", error="Traceback\n  x\nKeyError: 'a'\n\n", last_step=9)
    facts = facts_of(run, "failed")
    assert (facts.ending, facts.ending_detail) == ("the training script fails", "KeyError: 'a'")
    assert not facts_of(run, "finished").ending
    assert last_line("") == "" and last_line("\n \n") == ""
    stack = '  File "train.py", line 3, in step\n    y = self.down(x)\n'
    terminated = f"The process was terminated by SIGTERM.\n\nThe training was here:\n{stack}"
    assert last_line(terminated) == "The process was terminated by SIGTERM."


def test_the_departure_is_the_onset_of_the_verdict(admin: Visitor) -> None:
    """Not the first look whose interval is outside the tolerance, which comes later."""
    run = make_run(admin.project, "r", precision="fp8")
    curve = {"x": [100.0, 200.0, 300.0], "low": [-0.01, 0.02, 0.03], "high": [0.01, 0.04, 0.05]}
    onset = {"since": 120.0, "decided": 190.0, "since_step": 120, "decided_step": 190, "points": 70}
    Comparison.objects.create(
        run=run,
        baseline="bf16",
        to_step=300,
        verdict="worse",
        result={"curve": curve, "tolerance": 0.005, "onset": onset},
    )
    fact = facts_of(Run.objects.get(pk=run.pk), "running").departure
    assert fact is not None and (fact.step, fact.is_above) == (120, True)
    assert "Decided at step 190" in fact.detail
    Comparison.objects.update(result={"curve": curve, "tolerance": 0.005, "onset": None})
    fact = facts_of(Run.objects.get(pk=run.pk), "running").departure
    assert fact is not None and fact.step == 200
