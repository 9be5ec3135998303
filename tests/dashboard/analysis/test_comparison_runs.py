"""Which runs belong together: baselines by group or id, seed groups, parents."""

from __future__ import annotations

import json

import numpy as np
import pytest
import redis
from dashboard.helpers.recording import Recorder, make_run
from django.conf import settings

from fp8scope_dashboard import notifications
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.services import evaluate, unread_runs
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.tasks import compare_waiting
from fp8scope_dashboard.runs.models import Run, RunState

pytestmark = pytest.mark.django_db
FINISHED = {"state": RunState.FINISHED}


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("00000000-0000-0000-0000-00000000000a", True),
        ("00000000-0000-0000-0000-00000000000A", False),
        ("0000000000000000000000000000000a", False),
        ("bf16", False),
        ("", False),
    ],
)
def test_only_the_canonical_form_is_an_id(name: str, is_id: bool) -> None:
    assert (comparison_runs.as_run_id(name) is not None) == is_id


def test_a_baseline_may_be_one_run(project: Project) -> None:
    others = [make_run(project, f"bf16 {i}", group="bf16") for i in range(2)]
    alone = make_run(project, "bf16 alone")
    run = make_run(project, "fp8", precision="fp8", baseline=str(alone.id))
    of_group = make_run(project, "fp8", precision="fp8", baseline=str(others[0].id))
    assert comparison_runs.baseline_runs(run) == [alone]
    assert comparison_runs.baseline_runs(of_group) == others[:1]
    assert comparison_runs.dependents(alone) == [run.id] and comparison_runs.dependents(others[0]) == [
        of_group.id
    ]
    assert comparison_runs.dependents(others[1]) == []


def test_data_of_a_baseline_that_is_one_run_is_compared(project: Project) -> None:
    steps = np.arange(1, 101)
    alone, run = make_run(project, "bf16"), make_run(project, "fp8", precision="fp8")
    Run.objects.filter(pk=run.pk).update(baseline=str(alone.id))
    recorders = [Recorder(run=each) for each in (alone, run)]
    for recorder in recorders:
        recorder.rows(steps, {"loss": 2.0 + 3.0 * np.exp(-steps / 40.0)})
    first = compare(run.id)
    assert first is not None and comparison_runs.uncompared_runs() == []
    recorders[0].rows(steps + 100, {"loss": np.full(100, 2.0)})
    assert comparison_runs.uncompared_runs() == [run.id]
    for each in (alone, run):
        evaluate(each.id)
    assert unread_runs() == []


def test_a_run_that_is_its_own_baseline_is_read_once(project: Project) -> None:
    run = make_run(project, "fp8", precision="fp8")
    Run.objects.filter(pk=run.pk).update(baseline=str(run.id))
    Recorder(run=run).rows(np.arange(1, 41), {"loss": np.ones(40)})
    assert comparison_runs.baseline_runs(Run.objects.get(pk=run.pk)) == []
    evaluate(run.id)
    assert unread_runs() == []


def test_most_runs_take_part_in_no_comparison(project: Project) -> None:
    """Those with a baseline do, and the runs and groups that are one."""
    alone, named, of_group = make_run(project), make_run(project), make_run(project, group="bf16")
    make_run(project, group="fp8")
    first, second = make_run(project, baseline=str(named.pk)), make_run(project, baseline="bf16")
    elsewhere = make_run(create_project("other", "Other"), group="bf16")
    asked = [alone.pk, named.pk, of_group.pk, first.pk, second.pk, elsewhere.pk]
    assert set(comparison_runs.compared_among(asked)) == {named.pk, of_group.pk, first.pk, second.pk}


@pytest.mark.django_db(transaction=True)
def test_changed_runs_are_compared_by_one_job_each(project: Project) -> None:
    """One task takes all runs that changed, and leaves out those without a comparison."""
    make_run(project, group="bf16")
    compared, alone = make_run(project, baseline="bf16"), make_run(project)
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.flushdb()
        for begins, expected in ((False, 1), (False, 1), (True, 2)):
            if begins:
                # The job begins to read: what changes from now on needs another one.
                notifications.job_started(notifications.COMPARE_RUN, str(compared.pk))
            for run in (compared, alone):
                notifications.run_changed(run.pk, project.pk, "rows")
            assert notifications.flush()
            compare_waiting()
            headers = [json.loads(message)["headers"] for message in client.lrange("celery", 0, -1)]
            jobs = [task["argsrepr"] for task in headers if task["task"] == notifications.COMPARE_RUN]
            assert jobs == [f"['{compared.pk}']"] * expected
        client.flushdb()
