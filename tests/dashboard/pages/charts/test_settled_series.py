"""Scalars of runs that no longer change are kept in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.core.cache import cache
from django.utils import timezone
from redis import RedisError

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.charts.settled_series import thinned_scalars
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.queries import Series

STEPS = np.arange(30)


@pytest.fixture
def runs(project: Project) -> list[Run]:
    """Two runs that ended an hour ago."""
    made = []
    for number in range(2):
        run = make_run(project, f"run {number}")
        recorder = Recorder(run=run)
        recorder.rows(STEPS, {"loss": np.where(STEPS == 7, np.nan, STEPS + number)})
        recorder.finish()
        made.append(run)
    Run.objects.update(heartbeat_at=timezone.now() - timedelta(hours=1))
    return list(Run.objects.order_by("name"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of runs that each query has read."""
    original, counts = queries.scalars, list[int]()

    def scalars(run_ids: Sequence[UUID], *args: Any, **options: Any) -> dict[UUID, Series]:
        counts.append(len(run_ids))
        return original(run_ids, *args, **options)

    monkeypatch.setattr(queries, "scalars", scalars)
    return counts


def losses(runs: list[Run]) -> dict[UUID, Series]:
    return thinned_scalars(runs, "loss", first=None, last=None, points=20)


def test_it_works(runs: list[Run], reads: list[int]) -> None:
    first, again = losses(runs), losses(runs)
    assert reads == [2]
    for run in runs:
        np.testing.assert_array_equal(again[run.id].steps, first[run.id].steps)
        np.testing.assert_array_equal(again[run.id].values, first[run.id].values)
        assert again[run.id].thinned == first[run.id].thinned is True


def test_late_rows_are_read(runs: list[Run], reads: list[int]) -> None:
    losses(runs)
    Recorder(run=runs[0]).rows(STEPS + 30, {"loss": STEPS + 30.0})
    Run.objects.update(heartbeat_at=timezone.now() - timedelta(hours=1))
    lines = losses(list(Run.objects.order_by("name")))
    assert reads == [2, 1] and lines[runs[0].id].steps[-1] == 59


def test_a_run_that_has_just_sent_or_still_runs_is_read(runs: list[Run], reads: list[int]) -> None:
    Run.objects.filter(pk=runs[0].pk).update(heartbeat_at=timezone.now())
    Run.objects.filter(pk=runs[1].pk).update(state="running")
    now = list(Run.objects.order_by("name"))
    losses(now), losses(now)
    assert reads == [2, 2]


def test_without_redis_everything_is_read(
    runs: list[Run], reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: object, **options: object) -> None:
        raise RedisError("away")

    monkeypatch.setattr(cache, "get_many", away)
    monkeypatch.setattr(cache, "set_many", away)
    losses(runs), losses(runs)
    assert reads == [2, 2]
