"""No alarm is muted by an earlier start of the training, whatever its rule, or what people did to alerts.

The measure of a part of a training is a run that consists of this part only: what it raises there must be
raised again after any resumes, restarts, returns to earlier steps, and after any changes that people made to
earlier alerts.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Literal
from unittest.mock import patch

import numpy as np
import pytest
from dashboard.helpers.alerting import make_hook
from dashboard.helpers.faults import FAULTS, FAULTY_FROM, LENGTH, RECIPE, TENSORS, part, shorten_rules
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.custom_rules.documents import document_of, parse
from fp8scope_dashboard.alerts.models import Alert, Delivery, Rule
from fp8scope_dashboard.alerts.rules import KINDS
from fp8scope_dashboard.alerts.services import alerts_after, evaluate, unread_runs
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db

Return = Literal["resume", "restart", "rewind"]
HANDS = ("leave", "acknowledge", "mute", "resolve", "reopen")
# Kinds whose condition is one of the run, of several ranks, or of its baseline: other tests have them.
ELSEWHERE = {"above_baseline", "scale_disagreement", "threshold"}
ELSEWHERE |= {"rank_behind", "run_silent", "run_failed", "run_finished"}


@pytest.fixture
def project(db: None) -> Project:
    project = create_project("default", "Default")
    shorten_rules(project)
    make_hook(project)
    return project


class Training:
    """A run that is trained in parts."""

    def __init__(self, project: Project) -> None:
        self.run = make_run(project, recipe=RECIPE)
        self.recorder = Recorder(run=self.run, tensors=TENSORS)
        self.attempt, self.returns, self.step, self.generation = 0, 0, 0, "0"

    def go(self, what: Return, back: int) -> None:
        """Continue `back` steps earlier: in another process, from the beginning, or in the same process."""
        step = 0 if what == "restart" else max(0, self.step - back)
        if what != "rewind":
            self.attempt, self.returns = self.attempt + 1, 0
            self.recorder = Recorder(run=self.run, tensors=TENSORS, attempt=self.attempt)
        elif self.step - step > 2:
            self.returns += 1
        self.step = step
        self.generation = f"{self.attempt}.{self.returns}" if self.returns else str(self.attempt)

    def train(self, fault: str) -> None:
        """Train a part."""
        scalars, statistics = part(fault)
        steps = np.arange(self.step + 1, self.step + LENGTH + 1)
        self.recorder.rows(steps, scalars, statistics, rows_per_batch=LENGTH)
        self.step += LENGTH

    def alarms(self) -> set[tuple[str, int]]:
        """The kind and the onset, in steps of the part, of what has been found in this part."""
        begin = self.step - LENGTH
        found = set()
        for event in Alert.objects.filter(run=self.run, generation=self.generation):
            found.add((event.kind, _rounded(event.onset_step - begin)))
            further = event.evidence.get("further", [])
            found |= {(each["kind"], _rounded(each["onset_step"] - begin)) for each in further}
        return found


def _rounded(onset: int) -> int:
    """Blocks of points begin with a part's first row, which a return takes for a late one."""
    return round(onset, -1)


def change_by_hand(run: Run, how: str) -> None:
    """Do to every alert of a run what people can do to it."""
    ada, _ = User.objects.get_or_create(username="ada")
    for event in Alert.objects.filter(run=run).select_related("run"):
        if how == "acknowledge":
            lifecycle.acknowledge(event, ada)
        elif how == "mute":
            lifecycle.mute(event, ada, timezone.now() + timedelta(days=7))
        elif how in ("resolve", "reopen"):
            lifecycle.resolve(event, ada)
        if how == "reopen":
            lifecycle.reopen(event, ada)


@cache
def expected(fault: str) -> frozenset[tuple[str, int]]:
    """What a run raises that consists of one part."""
    project = create_project(f"alone-{fault}", "Alone")
    shorten_rules(project)
    training = Training(project)
    training.train(fault)
    evaluate(training.run.id)
    alarms = frozenset(training.alarms())
    project.delete()
    return alarms


def test_it_works(project: Project) -> None:
    assert set(FAULTS) | ELSEWHERE == set(KINDS)
    assert expected("") == set()
    training = Training(project)
    training.train("saturation_rate")
    evaluate(training.run.id)
    assert training.alarms() == {("saturation_rate", FAULTY_FROM)}


RETURNS: tuple[Return, ...] = ("resume", "restart", "rewind")


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_is_raised_again_whatever_became_of_its_earlier_alerts(
    project: Project, kind: str
) -> None:
    assert kind in {each for each, _ in expected(kind)}
    training = Training(project)
    for i, hand in enumerate(HANDS, list(FAULTS).index(kind)):
        newest = max(Alert.objects.values_list("id", flat=True), default=0)
        training.train(kind)
        evaluate(training.run.id)
        assert training.alarms() >= expected(kind)
        events = Alert.objects.filter(run=training.run, generation=training.generation)
        # To people and to the training, and nothing else with them.
        assert Delivery.objects.filter(event__in=events, reason="opened").count() == len(events)
        assert len(alerts_after(training.run.id, newest)) == len(events)
        change_by_hand(training.run, hand)
        training.go(RETURNS[i % len(RETURNS)], back=LENGTH)


PART = st.tuples(
    st.sampled_from(["resume", "restart", "rewind"]),
    st.integers(0, 2 * LENGTH),
    st.sampled_from(["", *FAULTS]),
    st.sampled_from(["", *HANDS]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.sampled_from(["", *FAULTS]), parts=st.lists(PART, min_size=1, max_size=5))
def test_no_order_of_returns_faults_and_changes_mutes_an_alarm(
    project: Project, first: str, parts: list[tuple[Return, int, str, str]]
) -> None:
    training = Training(project)
    training.train(first)
    for what, back, fault, hand in parts:
        # Without a hand nobody looks before the next part.
        if hand:
            evaluate(training.run.id)
            change_by_hand(training.run, hand)
        training.go(what, back)
        training.train(fault)
        if training.generation != "0" and not (what == "rewind" and back <= 2):
            evaluate(training.run.id)
            assert training.alarms() >= expected(fault)


def fail(training: Training) -> None:
    training.recorder.finish(error="RuntimeError: out of memory")


def fresh_attempt(training: Training) -> None:
    """Another process resumes the run, as the agent registers it."""
    training.go("resume", 0)
    Run.objects.filter(pk=training.run.pk).update(state="running", error="", finished_at=None)


def test_a_resume_that_fails_before_anybody_looks_is_another_alert(project: Project) -> None:
    training = Training(project)
    training.train("")
    fail(training)
    assert [event.kind for event in evaluate(training.run.id)] == ["run_failed"]
    fresh_attempt(training)
    fail(training)
    assert training.run.id in unread_runs()
    assert [event.kind for event in evaluate(training.run.id)] == ["run_failed"]
    assert list(Alert.objects.order_by("id").values_list("state", flat=True)) == ["resolved", "open"]
    assert training.run.id not in unread_runs() and evaluate(training.run.id) == []


def test_a_rank_that_hangs_after_a_return_to_an_earlier_step_is_found(project: Project) -> None:
    Rule.objects.exclude(kind="rank_behind").update(enabled=False)
    run = make_run(project)
    ranks = [Recorder(run=run, rank=rank) for rank in (0, 1)]

    def train(steps: range, rank: int) -> None:
        ranks[rank].rows(list(steps), {"loss": np.full(len(steps), 2.0)})

    for rank in (0, 1):
        train(range(1, 1001), rank)
        train(range(501, 601), rank)
    assert evaluate(run.id) == []
    train(range(601, 701), 0)
    assert _evaluated_after(run, 0) == [] and _evaluated_after(run, 61) == ["rank_behind"]


def test_a_resume_at_an_earlier_step_is_no_rank_behind(project: Project) -> None:
    Rule.objects.exclude(kind="rank_behind").update(enabled=False)
    run = make_run(project)
    for rank in (0, 1):
        Recorder(run=run, rank=rank).rows(np.arange(1, 1001), {"loss": np.full(1000, 2.0)})
    assert evaluate(run.id) == []
    for rank in (0, 1):
        Recorder(run=run, rank=rank, attempt=1).rows(np.arange(501, 511), {"loss": np.full(10, 2.0)})
    assert _evaluated_after(run, 61) == []


def _evaluated_after(run: Run, seconds: float) -> list[str]:
    """The kinds that open if the run is evaluated so much later, and its processes are alive."""
    moment = timezone.now() + timedelta(seconds=seconds)
    Run.objects.filter(pk=run.pk).update(heartbeat_at=moment)
    with patch.object(timezone, "now", return_value=moment):
        return [event.kind for event in evaluate(run.id)]


@pytest.fixture
def above_baseline(project: Project) -> tuple[Run, Recorder, np.ndarray]:
    """A run with an open alert above its baseline, at step 200 of 400; its losses."""
    Rule.objects.exclude(kind="above_baseline").update(enabled=False)
    steps = np.arange(1, 401)
    baseline = make_run(project, group="bf16", state="finished")
    Recorder(run=baseline).rows(steps, {"loss": np.random.default_rng(0).normal(2.0, 0.002, 400)})
    run = make_run(project, baseline="bf16")
    losses = np.where(steps > 100, 2.2, 2.0) + np.random.default_rng(1).normal(0.0, 0.002, 400)
    recorder = Recorder(run=run)
    recorder.rows(steps[:200], {"loss": losses[:200]})
    (event,) = evaluate(run.id)
    assert event.kind == "above_baseline"
    return run, recorder, losses


@pytest.mark.parametrize(("hand", "again"), [("resolve", True), ("leave", False), ("acknowledge", False)])
def test_a_run_that_continues_above_its_baseline_has_an_alert(
    above_baseline: tuple[Run, Recorder, np.ndarray], hand: str, again: bool
) -> None:
    run, _, losses = above_baseline
    change_by_hand(run, hand)
    Recorder(run=run, attempt=1).rows(np.arange(201, 301), {"loss": losses[200:300]})
    assert [event.kind for event in evaluate(run.id)] == ["above_baseline"] * again
    event = Alert.objects.get()
    assert event.state == ("acknowledged" if hand == "acknowledge" else "open")
    assert Delivery.objects.filter(event=event, reason="reopened").count() == again
    assert evaluate(run.id) == []


@pytest.mark.parametrize("kind", ["saturation_rate", "loss_not_finite", "scale_frozen"])
def test_a_rule_that_was_off_for_a_moment_reports_what_lasts(project: Project, kind: str) -> None:
    Rule.objects.exclude(kind=kind).update(enabled=False)
    training = Training(project)
    training.train(kind)
    (event,) = evaluate(training.run.id)
    rule = Rule.objects.get(kind=kind)
    rule_store.switch(rule, on=False)
    assert Alert.objects.get().state == "resolved"
    rule_store.switch(rule, on=True)
    scalars, statistics = part(kind)
    steps = np.arange(training.step + 1, training.step + 31)
    training.recorder.rows(
        steps,
        {name: values[-30:] for name, values in scalars.items()},
        {name: values[-30:] for name, values in statistics.items()},
    )
    assert [opened.kind for opened in evaluate(training.run.id)] == [kind]
    # It is so close to the end of the first that it is the same alert.
    event.refresh_from_db()
    assert (event.state, event.reopened) == ("open", 1)
    assert "reopened" in event.deliveries.values_list("reason", flat=True)


def test_another_limit_of_a_built_in_rule_ends_its_alert_only_with_its_condition(project: Project) -> None:
    Rule.objects.exclude(kind="saturation_rate").update(enabled=False)
    training = Training(project)
    training.train("saturation_rate")
    (event,) = evaluate(training.run.id)
    rule = Rule.objects.get(kind="saturation_rate")
    for rate, state in ((0.002, "open"), (0.5, "resolved")):
        document = document_of(rule) | {"parameters": {"rate": rate}}
        rule_store.apply(project, [parse(project, document)])
        scalars, statistics = part("saturation_rate")
        steps = np.arange(training.step + 1, training.step + 31)
        training.recorder.rows(steps, {}, {name: values[-30:] for name, values in statistics.items()})
        training.step += 30
        assert evaluate(training.run.id) == []
        event.refresh_from_db()
        assert event.state == state


def test_what_a_person_opened_again_is_sent_when_its_condition_comes_back(project: Project) -> None:
    Rule.objects.exclude(kind="loss_not_finite").update(enabled=False)
    run = make_run(project)
    recorder = Recorder(run=run)
    nan, fine = {"loss": np.full(50, np.nan)}, {"loss": np.full(50, 2.0)}
    recorder.rows(np.arange(1, 51), nan)
    recorder.rows(np.arange(51, 101), fine)
    evaluate(run.id)
    event = Alert.objects.get()
    ada = User.objects.create_user("ada")
    assert event.state == "resolved" and lifecycle.reopen(event, ada) and lifecycle.acknowledge(event, ada)
    number = alerts_after(run.id, 0)[-1]["id"]
    # Far from where it had ended.
    recorder.rows(np.arange(1001, 1051), fine)
    recorder.rows(np.arange(1051, 1101), nan)
    evaluate(run.id)
    event.refresh_from_db()
    assert event.state == "open"
    assert [alert["id"] > number for alert in alerts_after(run.id, 0)] == [True]
    assert Delivery.objects.filter(event=event, reason="reopened").exists()


def test_a_rank_that_sees_the_same_step_later_reopens_what_had_ended(project: Project) -> None:
    Rule.objects.exclude(kind="loss_not_finite").update(enabled=False)
    run = make_run(project)
    first, second = Recorder(run=run, rank=0), Recorder(run=run, rank=1)
    losses = np.full(100, 2.0)
    losses[49:60] = np.nan
    first.rows(np.arange(1, 101), {"loss": losses})
    evaluate(run.id)
    assert Alert.objects.get().state == "resolved"
    losses[49:] = np.nan
    second.rows(np.arange(1, 101), {"loss": losses})
    assert [event.kind for event in evaluate(run.id)] == ["loss_not_finite"]
    assert Alert.objects.get().state == "open"
