"""Alerts about the run itself: silent, failed, finished, a rank that is behind."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.detection.run_conditions import ConditionFacts, RankStep, rank_behind
from fp8scope_dashboard.alerts.detectors import State
from fp8scope_dashboard.alerts.models import Alert, AlertState, Rule
from fp8scope_dashboard.alerts.services import evaluate, unread_runs
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.runs.services import mark_silent

pytestmark = pytest.mark.django_db
FACTS = ConditionFacts(state="running", last_step=500, now=1_000.0, heartbeat=1_000.0)


def trained(project: Project, *ranks: int) -> list[Recorder]:
    run = make_run(project)
    recorders = [Recorder(run=run, rank=rank) for rank in ranks or (0,)]
    for recorder in recorders:
        recorder.rows(np.arange(1, 41), {"loss": np.full(40, 2.0)})
    return recorders


def kinds(run: Run, **fields: str) -> list[str]:
    return list(Alert.objects.filter(run=run, **fields).order_by("id").values_list("kind", flat=True))


def silence(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(heartbeat_at=timezone.now() - timedelta(minutes=2))
    assert mark_silent() == 1


def test_it_works(project: Project) -> None:
    (recorder,) = trained(project)
    assert evaluate(recorder.run.id) == []
    silence(recorder.run)
    (event,) = evaluate(recorder.run.id)
    assert (event.kind, event.severity, event.onset_step) == ("run_silent", "critical", 40)
    assert event.message.startswith("The run is silent since step 40: no process was heard from for 12")
    recorder.rows([41], {"loss": [2.0]})
    assert evaluate(recorder.run.id) == []
    event.refresh_from_db()
    assert event.state == AlertState.RESOLVED


def test_a_run_that_is_silent_again_at_the_same_step_is_another_alert(project: Project) -> None:
    (recorder,) = trained(project)
    for _ in range(2):
        silence(recorder.run)
        evaluate(recorder.run.id)
        Run.objects.update(heartbeat_at=timezone.now(), state="running")
        evaluate(recorder.run.id)
    assert kinds(recorder.run, state="resolved") == ["run_silent", "run_silent"]


def test_the_sweeper_finds_a_change_of_state_that_redis_forgot(project: Project) -> None:
    (recorder,) = trained(project)
    evaluate(recorder.run.id)
    assert unread_runs() == []
    Run.objects.update(state="failed", error="Traceback ...\nValueError: the data end here")
    assert unread_runs() == [recorder.run.id]
    (event,) = evaluate(recorder.run.id)
    assert event.message == "The run failed after step 40: ValueError: the data end here"
    assert unread_runs() == []


def test_a_failure_ends_when_the_run_is_resumed(project: Project) -> None:
    (recorder,) = trained(project)
    recorder.finish("RuntimeError: out of memory")
    (event,) = evaluate(recorder.run.id)
    assert event.kind == "run_failed"
    Recorder(run=recorder.run, attempt=1).rows([41, 42], {"loss": [2.0, 2.0]})
    Run.objects.update(state="running", error="")
    evaluate(recorder.run.id)
    event.refresh_from_db()
    assert event.state == AlertState.RESOLVED


def test_an_old_failure_is_no_news(project: Project) -> None:
    (recorder,) = trained(project)
    long_ago = timezone.now() - timedelta(days=3)
    Run.objects.update(state="failed", error="ValueError", heartbeat_at=long_ago)
    assert unread_runs() == [] and evaluate(recorder.run.id) == []


def test_the_end_of_a_run_is_an_alert_only_on_request(project: Project) -> None:
    (recorder,) = trained(project)
    recorder.finish()
    assert evaluate(recorder.run.id) == []
    Rule.objects.filter(kind="run_finished").update(enabled=True)
    assert [event.kind for event in evaluate(recorder.run.id)] == ["run_finished"]


def test_a_rank_that_does_not_follow_is_behind() -> None:
    state: State = {}
    seen = []
    for second in range(0, 300, 10):
        ranks = [RankStep(0, 500 + second), RankStep(1, 500 + min(second, 100))]
        facts = replace(FACTS, now=1_000.0 + second, ranks=ranks)
        state, findings = rank_behind(state, facts, {"seconds": 60.0})
        seen += [(second, finding.opened, finding.onset_step) for finding in findings]
    ((second, opened, onset),) = seen
    assert opened and onset == 600 and 160 <= second <= 230
    caught_up = replace(FACTS, now=1_400.0, ranks=[RankStep(0, 900), RankStep(1, 900)])
    _, (closed,) = rank_behind(state, caught_up, {"seconds": 60.0})
    assert not closed.opened


@pytest.mark.parametrize("delay", [0, 5, 30])
def test_ranks_whose_rows_arrive_late_are_not_behind(delay: int) -> None:
    state: State = {}
    for second in range(0, 600, 5):
        ranks = [RankStep(0, 500 + 10 * second), RankStep(1, 500 + 10 * max(0, second - delay))]
        state, findings = rank_behind(state, replace(FACTS, now=second, ranks=ranks), {"seconds": 60.0})
        assert findings == []


def test_a_rank_that_writes_a_checkpoint_as_long_as_before_is_not_behind() -> None:
    """Rank 0 stops for 90 s every 300 s; the others wait one step further. Then it hangs."""
    state: State = {}
    seen = []
    for second in range(0, 1_500, 5):
        step = 500 + second // 300 * 300 + min(second % 300, 210) if second < 1_200 else 1_700
        stopped = second % 300 >= 210 or second >= 1_200
        ranks = [RankStep(0, step - stopped), *(RankStep(rank, step) for rank in range(1, 4))]
        state, findings = rank_behind(state, replace(FACTS, now=second, ranks=ranks), {"seconds": 60.0})
        seen += [(second, finding.opened) for finding in findings]
    # The first pause is unknown, the hang is longer than twice the pauses.
    assert [opened for _, opened in seen] == [True, False, True]
    assert seen[0][0] < 300 and seen[2][0] >= 1_200


def test_a_rank_that_has_finished_is_not_behind(project: Project) -> None:
    first, second = trained(project, 0, 1)
    second.finish()
    first.rows(np.arange(41, 200), {"loss": np.full(159, 2.0)})
    evaluate(first.run.id)
    state = {"mark": [timezone.now().timestamp() - 100.0, 150]}
    rule = Rule.objects.get(kind="rank_behind")
    from_store = [RankStep(w.rank, w.last_step, w.finished_at is not None) for w in Writer.objects.all()]
    facts = ConditionFacts(
        state="running",
        last_step=199,
        now=timezone.now().timestamp(),
        heartbeat=timezone.now().timestamp(),
        error="",
        ranks=from_store,
    )
    assert rank_behind(state, facts, rule.parameters)[1] == []
    assert kinds(first.run) == []
