"""Whatever a run resumes, restarts or goes back to: no earlier start of the training mutes an alarm."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.apps import apps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.detection.generations import GenerationRows, segments, streams_of
from fp8scope_dashboard.alerts.detectors import State
from fp8scope_dashboard.alerts.models import Alert, AlertState, Rule
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db
TENSORS = ["blocks.0.input", "blocks.1.input"]
LENGTH = 45
# Steps of a segment from which on it is at fault; after the warm-up, and early enough to be detected.
FAULTY_FROM = 25


@dataclass
class Training:
    """A run that is trained in parts, each of which ends where it is broken off."""

    run: Run
    attempt: int = 0
    step: int = 0
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(run=self.run, tensors=TENSORS)

    def resume(self, step: int) -> None:
        """Another process continues from a step."""
        self.attempt, self.step = self.attempt + 1, step
        self.recorder = Recorder(run=self.run, tensors=TENSORS, attempt=self.attempt)

    def train(self, fault: str = "") -> range:
        """Train LENGTH steps. Returns the steps at fault."""
        steps = np.arange(self.step + 1, self.step + LENGTH + 1)
        loss = 2.0 + np.random.default_rng(0).normal(0.0, 0.01, LENGTH)
        saturated = np.zeros((LENGTH, 2))
        if "nan" in fault:
            loss[FAULTY_FROM:] = np.nan
        if "overflow" in fault:
            saturated[FAULTY_FROM:, 1] = 20.0
        counts = {"saturated": saturated, "numel": np.full((LENGTH, 2), 1000.0)}
        self.recorder.rows(steps, {"loss": loss}, counts, rows_per_batch=15)
        self.step = int(steps[-1])
        return range(int(steps[FAULTY_FROM]), self.step + 1) if fault else range(0)


def events_of(run: Run) -> list[tuple[str, str, int, str]]:
    rows = Alert.objects.filter(run=run).order_by("kind", "generation", "onset_step")
    return list(rows.values_list("kind", "generation", "onset_step", "state"))


def test_it_works(project: Project) -> None:
    training = Training(make_run(project))
    faulty = training.train("nan")
    (first,) = evaluate(training.run.id)
    training.resume(20)
    training.train()
    assert evaluate(training.run.id) == []
    first.refresh_from_db()
    assert (first.onset_step, first.state) == (faulty[0], AlertState.RESOLVED)
    assert first.history.values_list("text", flat=True).last() == "The training continued from step 21."


def test_the_same_fault_after_a_resume_is_another_alert(project: Project) -> None:
    training = Training(make_run(project))
    training.train("nan")
    evaluate(training.run.id)
    training.resume(0)
    training.train("nan")
    assert [(event.kind, event.generation) for event in evaluate(training.run.id)] == [
        ("loss_not_finite", "1")
    ]


def test_another_fault_after_a_resume_is_not_outranked_by_the_first(project: Project) -> None:
    training = Training(make_run(project))
    training.train("nan")
    evaluate(training.run.id)
    training.resume(training.step)
    training.train("overflow")
    assert [event.kind for event in evaluate(training.run.id)] == ["saturation_rate"]


def test_a_fault_of_a_restart_without_a_new_attempt_number_is_found(project: Project) -> None:
    training = Training(make_run(project))
    training.train("nan")
    evaluate(training.run.id)
    training.recorder = Recorder(run=training.run, tensors=TENSORS)
    training.step = 0
    training.train("nan")
    assert [event.generation for event in evaluate(training.run.id)] == ["0+1"]


def test_processes_that_do_not_know_their_rank_do_not_end_each_other(project: Project) -> None:
    run = make_run(project)
    steps = np.arange(1, 101)
    one, two = Recorder(run=run), Recorder(run=run)
    for first in range(0, 100, 20):
        part = slice(first, first + 20)
        one.rows(steps[part], {"loss": np.where(steps > 50, np.nan, 2.0)[part]})
        two.rows(steps[part], {"loss": np.full(100, 2.0)[part]})
    evaluate(run.id)
    assert [event[3] for event in events_of(run)] == [AlertState.OPEN]


def test_what_an_event_outranked_opens_when_that_event_ends(project: Project) -> None:
    run = make_run(project)
    recorder = Recorder(run=run, tensors=TENSORS)
    steps = np.arange(1, 201)
    saturated = np.zeros((200, 2))
    saturated[60:] = 20.0
    loss = np.where((steps > 55) & (steps < 90), np.nan, 2.0)
    for first in range(0, 200, 25):
        part = slice(first, first + 25)
        counts = {"saturated": saturated[part], "numel": np.full((25, 2), 1000.0)}
        recorder.rows(steps[part], {"loss": loss[part]}, counts)
        evaluate(run.id)
    assert [(kind, onset, state) for kind, _, onset, state in events_of(run)] == [
        ("loss_not_finite", 56, AlertState.RESOLVED),
        ("saturation_rate", 61, AlertState.OPEN),
    ]


def test_a_run_above_its_baseline_is_found_again_after_a_return(project: Project) -> None:
    steps = np.arange(1, 301)
    baseline = make_run(project, group="bf16", state="finished")
    Recorder(run=baseline).rows(steps, {"loss": np.random.default_rng(0).normal(2.0, 0.002, 300)})
    run = make_run(project, baseline="bf16")
    Rule.objects.exclude(kind="above_baseline").update(enabled=False)
    high = np.where(steps > 100, 2.2, 2.0) + np.random.default_rng(1).normal(0.0, 0.002, 300)
    Recorder(run=run).rows(steps, {"loss": high})
    (first,) = evaluate(run.id)
    Recorder(run=run, attempt=1).rows(steps[50:], {"loss": high[50:]})
    (second,) = evaluate(run.id)
    first.refresh_from_db()
    assert first.state == AlertState.RESOLVED and second.generation == "1"
    assert 100 < second.onset_step <= 105


def test_an_alert_above_the_baseline_stays_open_over_a_resume_that_repeats_nothing(project: Project) -> None:
    steps = np.arange(1, 301)
    baseline = make_run(project, group="bf16", state="finished")
    Recorder(run=baseline).rows(steps, {"loss": np.random.default_rng(0).normal(2.0, 0.002, 300)})
    run = make_run(project, baseline="bf16")
    Rule.objects.exclude(kind="above_baseline").update(enabled=False)
    high = np.where(steps > 150, 2.2, 2.0) + np.random.default_rng(1).normal(0.0, 0.002, 300)
    Recorder(run=run).rows(steps[:200], {"loss": high[:200]})
    (event,) = evaluate(run.id)
    Recorder(run=run, attempt=1).rows(steps[200:], {"loss": high[200:]})
    assert evaluate(run.id) == []
    event.refresh_from_db()
    assert event.state == AlertState.OPEN


Part = tuple[Literal["resume", "restart", "rewind"], int, str, bool]
FAULTS = st.sampled_from(["", "nan", "overflow", "nan overflow"])
PARTS = st.one_of(
    st.tuples(st.sampled_from(["resume", "restart"]), st.integers(0, 60), FAULTS, st.booleans()),
    # The detectors know that it is a return with the second row below the furthest step.
    st.tuples(st.just("rewind"), st.integers(3, 60), FAULTS, st.booleans()),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first=st.sampled_from(["", "nan", "overflow"]), parts=st.lists(PARTS, min_size=1, max_size=4))
def test_no_order_of_resumes_restarts_and_rewinds_mutes_an_alarm(
    project: Project, first: str, parts: list[Part]
) -> None:
    training = Training(make_run(project))
    expected = _expected("0", training.train(first), first)
    attempt, returns = 0, 0
    for what, back, fault, look in parts:
        if look:
            evaluate(training.run.id)
        step = max(0, training.step - back) if what != "restart" else 0
        if what == "rewind":
            training.step, returns = step, returns + 1
        else:
            training.resume(step)
            attempt, returns = attempt + 1, 0
        generation = f"{attempt}.{returns}" if returns else str(attempt)
        expected |= _expected(generation, training.train(fault), fault)
    evaluate(training.run.id)
    events = events_of(training.run)
    assert {event[:3] for event in events} >= expected
    live = f"{attempt}.{returns}" if returns else str(attempt)
    assert all(generation == live for _, generation, _, state in events if state != AlertState.RESOLVED)
    assert events == _seen_at_once(project, first, parts)


def _expected(generation: str, faulty: range, fault: str) -> set[tuple[str, str, int]]:
    kinds = {"nan": "loss_not_finite", "overflow": "saturation_rate", "nan overflow": "loss_not_finite"}
    return {(kinds[fault], generation, faulty[0])} if fault else set()


def _seen_at_once(project: Project, first: str, parts: list[Part]) -> list[tuple[str, str, int, str]]:
    """The events if nobody looks before the end."""
    training = Training(make_run(project))
    training.train(first)
    for what, back, fault, _ in parts:
        step = max(0, training.step - back) if what != "restart" else 0
        if what != "rewind":
            training.resume(step)
        else:
            training.step = step
        training.train(fault)
    evaluate(training.run.id)
    return events_of(training.run)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_division_into_generations_does_not_depend_on_the_batches(
    steps: list[int], cuts: list[int]
) -> None:
    array = np.asarray(steps, np.int64)

    def labels(edges: list[int]) -> list[int]:
        state: State = {}
        numbers, number = [], 0
        for begin, end in zip(edges, edges[1:], strict=False):
            state, parts = segments(state, array[begin:end])
            for part in parts:
                number += part.returned_to is not None
                numbers += [number] * (part.last - part.first)
        assert state["returns"] == number
        return numbers

    whole = labels([0, len(steps)])
    assert labels([0, *sorted(min(cut, len(steps)) for cut in cuts), len(steps)]) == whole
    assert len(whole) == len(steps)


def test_a_late_row_is_no_return() -> None:
    _, parts = segments({}, np.array([1, 2, 3, 2, 4, 5, 5, 6]))
    assert parts == [GenerationRows(0, 8)]
    _, parts = segments({}, np.array([1, 2, 3, 4, 5, 2, 3, 4]))
    assert parts == [GenerationRows(0, 6), GenerationRows(6, 8, returned_to=2)]


def test_an_upgrade_keeps_what_resolves_an_open_event(project: Project) -> None:
    training = Training(make_run(project))
    training.train("nan")
    (event,) = evaluate(training.run.id)
    before = event.seen_by
    Alert.objects.update(generation="", seen_by=[])
    import_module("fp8scope_dashboard.alerts.migrations.0004_generations").note_who_sees_it(apps, None)
    event.refresh_from_db()
    assert (event.generation, event.seen_by) == ("0", before)
    training.resume(20)
    training.train()
    evaluate(training.run.id)
    event.refresh_from_db()
    assert event.state == AlertState.RESOLVED


def test_an_attempt_without_rows_ends_nothing(project: Project) -> None:
    training = Training(make_run(project))
    training.train("nan")
    training.resume(10)
    assert [stream.ended_by for stream in streams_of(training.run)] == [None, None]
    training.train()
    assert [stream.ended_by for stream in streams_of(training.run)] == [11, None]
