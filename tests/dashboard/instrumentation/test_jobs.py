"""Measurements of jobs, and the context of their log lines."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from fp8scope_dashboard.instrumentation import jobs, log_context, metrics
from fp8scope_dashboard.instrumentation.counts import Key
from fp8scope_dashboard.notifications import COMPARE_RUN


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[Key, float]:
    amounts: dict[Key, float] = {}

    def add(key: Key, amount: float) -> None:
        amounts[key] = amounts.get(key, 0.0) + amount

    monkeypatch.setattr(metrics.counts, "add", add)
    return amounts


def task(name: str, **headers: Any) -> Any:
    return SimpleNamespace(name=name, request=SimpleNamespace(**headers))


def test_a_job_is_counted_with_its_duration_and_its_wait(counted: dict[Key, float]) -> None:
    sweep = task("fp8scope_dashboard.alerts.tasks.sweep", **{jobs.QUEUED_AT: time.time() - 3.0})
    jobs.note_start("1", sweep, ())
    assert dict(log_context.context.get()) == {"task": "alerts.sweep", "job": "1"}
    jobs.note_end("1", sweep, state="SUCCESS")
    assert not log_context.context.get()
    assert counted[("fp8scope_jobs", ("alerts.sweep", "success"), "")] == 1.0
    assert counted[("fp8scope_job_wait_seconds", ("alerts.sweep",), "5")] == 1.0
    assert 3.0 <= counted[("fp8scope_job_wait_seconds", ("alerts.sweep",), "sum")] < 60.0
    assert counted[("fp8scope_job_seconds", ("alerts.sweep",), "0.01")] == 1.0


def test_a_job_of_a_run_says_which_and_the_request_that_queued_it(counted: dict[Key, float]) -> None:
    run = str(uuid4())
    headers: dict[str, Any] = {}
    token = log_context.context.set({"request": "4f0c"})
    try:
        jobs.note_queueing(headers=headers)
    finally:
        log_context.context.reset(token)
    compare = task(COMPARE_RUN, **headers)
    jobs.note_start("2", compare, (run,))
    fields = dict(log_context.context.get())
    jobs.note_end("2", compare, state="FAILURE")
    assert (fields["run"], fields["request"], fields["task"]) == (run, "4f0c", "analysis.compare_run")
    assert counted[("fp8scope_jobs", ("analysis.compare_run", "failure"), "")] == 1.0


def test_a_task_queued_by_an_older_version_has_no_wait(counted: dict[Key, float]) -> None:
    old = task("fp8scope_dashboard.alerts.tasks.deliver")
    jobs.note_start("3", old, ())
    jobs.note_end("3", old)
    jobs.note_end("3", old)
    assert {key[0] for key in counted} == {"fp8scope_jobs", "fp8scope_job_seconds"}
    assert counted[("fp8scope_jobs", ("alerts.deliver", "unknown"), "")] == 1.0
