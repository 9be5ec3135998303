"""Evaluating rules over stored runs opens and resolves events and reads each message once."""

from __future__ import annotations

import threading
from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.apps import apps
from django.db import connection
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.models import RUN_WIDE, Alert, AlertState, DetectorState, Rule
from fp8scope_dashboard.alerts.services import evaluate, unjudged, unread_runs
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db
STEPS = np.arange(1, 301)
OLD_KINDS = ("loss_not_finite", "loss_spike", "loss_divergence", "above_baseline", "saturation_rate")


def noisy_loss(seed: int, steps: np.ndarray = STEPS, sd: float = 0.01) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0.0, sd, len(steps))
    return 2.0 + 3.0 * np.exp(-steps / 60.0) + noise


def kinds(run: Run) -> list[str]:
    return list(Alert.objects.filter(run=run).order_by("id").values_list("kind", flat=True))


def test_it_works(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run)
    losses = noisy_loss(0)
    losses[200:] = np.nan
    recorder.rows(STEPS, {"loss": losses})
    (event,) = evaluate(run.id)
    assert (event.kind, event.onset_step, event.step) == ("loss_not_finite", 201, 201)
    assert event.message == f"Loss became NaN at step 201; before, it was {losses[199]:.4g}."
    assert event.step_time is not None
    (series,) = event.evidence["series"]
    assert series["steps"][-1] == 201 and series["values"][-1] == "NaN"
    assert evaluate(run.id) == [] and Alert.objects.count() == 1


def test_a_healthy_run_has_no_event(project: Project) -> None:
    run = make_run(project)
    Recorder(run=run).rows(STEPS, {"loss": noisy_loss(1)})
    assert evaluate(run.id) == []
    assert DetectorState.objects.get(run=run, writer=RUN_WIDE).rows == 300


def test_the_result_does_not_depend_on_when_it_is_evaluated(project: Project) -> None:
    losses = noisy_loss(2)
    losses[150:170] += 2.0
    losses[250:] = np.inf
    events = []
    for rows_per_batch, often in ((300, False), (7, True)):
        run = make_run(project)
        recorder = Recorder(run=run)
        for first in range(0, 300, 50):
            part = slice(first, first + 50)
            recorder.rows(STEPS[part], {"loss": losses[part]}, rows_per_batch=rows_per_batch)
            if often:
                evaluate(run.id)
        evaluate(run.id)
        events.append(
            list(Alert.objects.filter(run=run).order_by("id").values_list("kind", "onset_step", "step"))
        )
    assert events[0] == events[1]
    assert ("loss_not_finite", 251, 251) in events[0]


def test_an_event_resolves_when_the_run_recovers(project: Project) -> None:
    run = make_run(project)
    losses = noisy_loss(3)
    losses[100:105] = np.nan
    Recorder(run=run).rows(STEPS, {"loss": losses})
    evaluate(run.id)
    event = Alert.objects.get(run=run)
    assert event.kind == "loss_not_finite" and event.state == AlertState.RESOLVED
    assert event.resolved_at is not None


def test_a_diverging_run_has_few_events(project: Project) -> None:
    run = make_run(project)
    losses = noisy_loss(4)
    losses[150:] += np.exp(np.arange(150) / 10.0)
    losses[220:] = np.nan
    for _ in range(3):
        evaluate(run.id)
    Recorder(run=run).rows(STEPS, {"loss": losses})
    evaluate(run.id)
    assert set(kinds(run)) <= {"loss_spike", "loss_divergence", "loss_not_finite"}
    assert len(kinds(run)) == len(set(kinds(run)))


def test_a_run_above_its_baseline_opens_one_event(project: Project) -> None:
    for seed in range(3):
        baseline = make_run(project, group="bf16", state="finished")
        Recorder(run=baseline).rows(STEPS, {"loss": noisy_loss(seed, sd=0.002)})
    run = make_run(project, baseline="bf16")
    Recorder(run=run).rows(STEPS, {"loss": noisy_loss(9, sd=0.002) * np.where(STEPS > 200, 1.1, 1.0)})
    (event,) = evaluate(run.id)
    assert event.kind == "above_baseline"
    assert 200 < event.onset_step <= 205 and event.step - event.onset_step < 40
    assert len(event.evidence["baseline"]) == 3
    healthy = make_run(project, baseline="bf16")
    Recorder(run=healthy).rows(STEPS, {"loss": noisy_loss(10, sd=0.002)})
    assert evaluate(healthy.id) == []


def test_waits_for_a_running_baseline(project: Project) -> None:
    baseline = make_run(project, group="bf16")
    slow = Recorder(run=baseline)
    slow.rows(STEPS[:50], {"loss": noisy_loss(0)[:50]})
    run = make_run(project, baseline="bf16")
    Recorder(run=run).rows(STEPS, {"loss": noisy_loss(1) * np.where(STEPS > 100, 1.2, 1.0)})
    evaluate(run.id)
    assert "above_baseline" not in kinds(run)
    assert run.id in unread_runs()
    Alert.objects.all().delete()
    slow.rows(STEPS[50:], {"loss": noisy_loss(0)[50:]})
    assert [event.kind for event in evaluate(run.id)] == ["above_baseline"]
    evaluate(baseline.id)
    assert unread_runs() == []


def test_aligns_runs_of_different_batch_sizes_on_tokens(project: Project) -> None:
    steps = np.arange(1, 801)
    baseline = make_run(project, group="bf16", state="finished")
    Recorder(run=baseline).rows(steps, {"loss": noisy_loss(0, steps), "tokens": steps * 100.0})
    run = make_run(project, baseline="bf16")
    # Twice the batch: its step 50 has seen what the baseline had at step 100.
    losses = noisy_loss(0, steps)[1::2] * np.where(steps[:400] > 250, 1.1, 1.0)
    Recorder(run=run).rows(steps[:400], {"loss": losses, "tokens": steps[:400] * 200.0})
    (event,) = [event for event in evaluate(run.id) if event.kind == "above_baseline"]
    assert 250 < event.onset_step <= 255


def test_saturating_tensors_are_one_event(project: Project) -> None:
    run = make_run(project)
    names = [f"blocks.{i}.mlp.up.input" for i in range(40)]
    recorder = Recorder(run=run, tensors=names)
    saturated = np.zeros((300, 40))
    saturated[100:, :] = 100.0 * np.arange(1, 41)
    recorder.rows(
        STEPS,
        {"loss": noisy_loss(5)},
        {"saturated": saturated, "nonfinite": np.zeros((300, 40)), "numel": np.full((300, 40), 1e5)},
    )
    (event,) = evaluate(run.id)
    assert (event.kind, event.onset_step, event.step) == ("saturation_rate", 101, 110)
    assert event.evidence["tensors"][0] == {
        "name": names[39],
        "rate": 0.04,
        "onset_step": 101,
        "after_step": 100,
    }
    assert event.evidence["series"][0]["values"][-1] == pytest.approx(0.04)
    assert event.message.startswith(
        "39 tensors in layers 1-39 overflow, first blocks.1.mlp.up.input at step 101"
    )


def test_waits_for_a_missing_message_and_then_continues(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run)
    recorder.rows(STEPS[:20], {"loss": noisy_loss(0)[:20]})
    recorder.seq += 1  # a message that never comes
    losses = noisy_loss(0)[20:]
    losses[10] = np.nan
    recorder.rows(STEPS[20:], {"loss": losses})
    assert evaluate(run.id) == [] and run.id in unread_runs()
    Receipt.objects.filter(run=run).update(received_at=timezone.now() - timedelta(minutes=2))
    assert [event.kind for event in evaluate(run.id)] == ["loss_not_finite"]
    assert unread_runs() == []


def test_the_seq_of_an_evaluation_is_not_a_gap(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run)
    recorder.rows(STEPS[:20], {"loss": noisy_loss(0)[:20]})
    recorder.evaluation(20, [1.0, 0.0])
    recorder.rows([21], {"loss": [np.nan]})
    assert len(evaluate(run.id)) == 1


def test_the_same_condition_on_many_ranks_is_one_event(project: Project) -> None:
    run = make_run(project)
    recorders = [Recorder(run=run, rank=rank) for rank in range(3)]
    losses = noisy_loss(0)
    losses[100:] = np.nan
    for recorder in recorders:
        recorder.rows(STEPS, {"loss": losses})
    assert [event.kind for event in evaluate(run.id)] == ["loss_not_finite"]


def test_an_event_stays_open_while_any_rank_detects_it(project: Project) -> None:
    run = make_run(project)
    first, second = Recorder(run=run, rank=0), Recorder(run=run, rank=1)
    broken = np.full(300, np.nan)
    healed = noisy_loss(0)
    healed[0] = np.nan
    first.rows(STEPS, {"loss": healed})
    second.rows(STEPS, {"loss": broken})
    evaluate(run.id)
    assert Alert.objects.get(run=run, kind="loss_not_finite").state == AlertState.OPEN


def test_a_disabled_rule_finds_nothing(project: Project) -> None:
    Rule.objects.filter(project=project).update(enabled=False)
    run = make_run(project)
    Recorder(run=run).rows(STEPS, {"loss": np.full(300, np.nan)})
    assert evaluate(run.id) == []


def test_ignores_a_deleted_run(project: Project) -> None:
    run = make_run(project)
    run_id = run.id
    run.delete()
    assert evaluate(run_id) == []


@pytest.mark.django_db(transaction=True)
def test_concurrent_workers_open_no_event_twice() -> None:
    project = create_project("default", "Default")
    run = make_run(project)
    recorder = Recorder(run=run)
    losses = noisy_loss(0)
    losses[100:] = np.nan
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                evaluate(run.id)
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    recorder.rows(STEPS, {"loss": losses}, rows_per_batch=5)
    for worker in workers:
        worker.join()
    evaluate(run.id)
    assert failures == []
    assert kinds(run) == ["loss_not_finite"]
    state = DetectorState.objects.get(run=run, writer=recorder.uuid)
    assert state.next_seq == 60


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_dies_leaves_a_consistent_state(monkeypatch: pytest.MonkeyPatch) -> None:
    project = create_project("default", "Default")
    run = make_run(project)
    recorder = Recorder(run=run)
    recorder.rows(STEPS[:20], {"loss": np.full(20, np.nan)})
    with monkeypatch.context() as patched:
        patched.setattr("fp8scope_dashboard.alerts.delivery.outbox.enqueue", _die)
        with pytest.raises(KeyboardInterrupt):
            evaluate(run.id)
    assert Alert.objects.count() == 0 and not DetectorState.objects.filter(next_seq__gt=0).exists()
    assert len(evaluate(run.id)) == 1


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def baseline_state(run: Run) -> dict[str, Any]:
    """The state of the comparison of a run with its baseline."""
    rule = Rule.objects.get(project=run.project, kind="above_baseline", run=None)
    state: dict[str, Any] = DetectorState.objects.get(run=run, writer=RUN_WIDE).state[str(rule.pk)]
    return state


def test_compares_runs_that_log_at_other_steps(project: Project) -> None:
    """One logs at 5, 15, 25, ..., the other at 10, 20, 30, ...: the baseline is interpolated."""
    steps = np.arange(10, 6001, 10)
    baseline = make_run(project, group="bf16", state="finished")
    Recorder(run=baseline).rows(steps, {"loss": 2.0 + noisy_loss(0, steps, sd=0.005) / 10.0})
    for raised in (1.0, 1.05):
        run = make_run(project, baseline="bf16")
        late = np.where(steps > 3000, raised, 1.0)
        Recorder(run=run).rows(steps - 5, {"loss": late * (2.0 + noisy_loss(1, steps - 5, sd=0.005) / 10.0)})
        evaluate(run.id)
        assert ("above_baseline" in kinds(run)) is (raised > 1.0)
        assert baseline_state(run)["interpolates"] and baseline_state(run)["note"] == ""


def test_says_that_runs_cannot_be_compared(project: Project) -> None:
    baseline = make_run(project, group="bf16", state="finished")
    Recorder(run=baseline).rows([1, 5000], {"loss": [2.0, 2.0]})
    run = make_run(project, baseline="bf16")
    Recorder(run=run).rows(STEPS + 50, {"loss": noisy_loss(1)})
    evaluate(run.id)
    assert baseline_state(run)["note"].startswith("Cannot compare: run and its baseline have no losses")
    assert unjudged(run) == [baseline_state(run)["note"]] and unjudged(baseline) == []
    Rule.objects.filter(project=project, kind="above_baseline").update(enabled=False)
    assert unjudged(run) == []


def test_says_that_a_run_is_too_short_to_compare(project: Project) -> None:
    """A fine-tuning of 38 points that lost a nat raised no alarm, without a word."""
    baseline = make_run(project, group="bf16", state="finished")
    run = make_run(project, baseline="bf16")
    for each in (baseline, run):
        Recorder(run=each).rows(STEPS[:38], {"loss": noisy_loss(0, STEPS[:38])})
    evaluate(run.id)
    assert unjudged(run) == []
    Run.objects.filter(pk=run.pk).update(state="finished")
    (note,) = unjudged(Run.objects.get(pk=run.pk))
    assert note.startswith("Too short to compare: points of loss in common with the baseline: 38.")


def test_a_schedule_of_another_length_raises_no_alarm(project: Project) -> None:
    """With a schedule 10 % longer the learning rate, and so the loss, is higher at each step."""

    def loss(seed: int, planned: int) -> np.ndarray:
        return noisy_loss(seed, sd=0.005) - 0.5 * STEPS / planned

    baseline = make_run(project, group="bf16", state="finished", total_steps=300)
    Recorder(run=baseline).rows(STEPS, {"loss": loss(0, 300)})
    longer = make_run(project, baseline="bf16", total_steps=330)
    Recorder(run=longer).rows(STEPS, {"loss": loss(1, 330)})
    evaluate(longer.id)
    assert kinds(longer) == []
    assert baseline_state(longer)["note"].startswith("The schedules differ: 330 steps in this run, 300 in")
    broken = make_run(project, baseline="bf16", total_steps=330)
    Recorder(run=broken).rows(STEPS, {"loss": loss(1, 330) * np.where(STEPS > 200, 1.4, 1.0)})
    evaluate(broken.id)
    assert "above_baseline" in kinds(broken) or "loss_divergence" in kinds(broken)


def test_an_upgrade_adds_the_new_rules_and_resolves_an_old_saturation(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run, tensors=["blocks.0.input"])
    counts = {"saturated": np.full((60, 1), 50.0), "numel": np.full((60, 1), 1000.0)}
    recorder.rows(STEPS[:60], {"loss": noisy_loss(0)[:60]}, counts)
    (event,) = evaluate(run.id)
    rule = Rule.objects.get(project=project, kind="saturation_rate")
    state = DetectorState.objects.get(run=run, writer=recorder.uuid)
    before = {"last_step": 60, "first_step": 1, "open": True, "onset": event.onset_step, "calm": 0, "gap": 0}
    state.state = {str(rule.pk): {**before, "counts": {"0": [50, event.onset_step, 0.05]}}}
    state.save(update_fields=["state"])
    Rule.objects.exclude(pk=rule.pk).delete()
    migration = import_module("fp8scope_dashboard.alerts.migrations.0007_signals")
    migration.add_rules(apps, None)
    migration.convert_saturation(apps, None)
    import_module("fp8scope_dashboard.alerts.migrations.0009_early_signs").add_rules(apps, None)
    added = dict(Rule.objects.filter(project=project).exclude(pk=rule.pk).values_list("kind", "severity"))
    new = {name: kind for name, kind in rules.KINDS.items() if kind.is_default and name not in OLD_KINDS}
    assert added == {name: kind.severity for name, kind in new.items()}
    recorder.rows(STEPS[60:120], {"loss": noisy_loss(0)[60:120]}, {**counts, "saturated": np.zeros((60, 1))})
    assert evaluate(run.id) == []
    event.refresh_from_db()
    assert event.state == AlertState.RESOLVED


def test_an_open_alert_of_the_earlier_loss_detectors_ends_and_they_read_on(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run)
    losses = noisy_loss(0)
    losses[200:] *= 2.0
    recorder.rows(STEPS[:250], {"loss": losses[:250]})
    (event,) = [event for event in evaluate(run.id) if event.kind == "loss_divergence"]
    rule = Rule.objects.get(project=project, kind="loss_divergence", run=None)
    rule.parameters = {"fraction": 0.02, "sigmas": 8.0, "points": 20, "span": 50}
    rule.save()
    state = DetectorState.objects.get(run=run, writer=recorder.uuid)
    state.state = {**state.state, str(rule.pk): {"open": True, "last_step": 250, "ema": 4.0, "minimum": 2.0}}
    state.save(update_fields=["state"])
    import_module("fp8scope_dashboard.alerts.migrations.0008_loss_detectors").replace_detectors(apps, None)
    event.refresh_from_db()
    rule.refresh_from_db()
    assert event.state == AlertState.RESOLVED and "update" in event.evidence["resolved_because"]
    assert rule.parameters == {"span": 50}
    recorder.rows(STEPS[250:], {"loss": losses[250:]})
    assert evaluate(run.id) == []


def test_a_divergence_begins_with_the_spike_that_it_follows(project: Project) -> None:
    """The loss rises too slowly at first to be dated by the divergence; the spike has its first step."""
    run = make_run(project)
    losses = noisy_loss(3)
    losses[220:] += np.concatenate([np.full(6, 0.4), np.full(74, 2.0)])
    Recorder(run=run).rows(STEPS, {"loss": losses})
    spike, divergence = sorted(evaluate(run.id), key=lambda event: event.step)
    assert (spike.kind, divergence.kind) == ("loss_spike", "loss_divergence")
    assert divergence.onset_step == spike.onset_step == 221
    assert divergence.message.endswith("It began at about step 221, as the alert 'Loss spike' says.")
    assert divergence.evidence["own_onset"] > 221
    assert evaluate(run.id) == []


def test_an_early_divergence_is_an_alert_at_its_first_step(project: Project) -> None:
    run = make_run(project)
    losses = noisy_loss(4)
    losses[62:] = 138.7
    Recorder(run=run).rows(STEPS, {"loss": losses})
    onsets = {event.kind: event.onset_step for event in evaluate(run.id)}
    assert onsets["loss_divergence"] == 63 == onsets.get("loss_spike", 63)
