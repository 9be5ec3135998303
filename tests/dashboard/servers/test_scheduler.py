"""Celery's scheduler after the system clock was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery
from kombu.utils.imports import symbol_by_name

from fp8scope_dashboard.celery import app as application
from fp8scope_dashboard.servers.scheduler import Scheduler

SECONDS = 10.0


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    app = Celery("scheduling", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {"sweep": {"task": "sweep", "schedule": SECONDS}}
    made = Scheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    yield made
    made.close()


def test_it_works(scheduler: Scheduler) -> None:
    """The next task is due after its interval, and not when the clock's wrong time has come again."""
    assert scheduler.tick() <= SECONDS
    scheduler.schedule["sweep"].last_run_at += timedelta(hours=3)
    scheduler.populate_heap()
    assert scheduler.tick() <= SECONDS
    assert abs(scheduler.schedule["sweep"].last_run_at - scheduler.app.now()) < timedelta(seconds=SECONDS)


def test_beat_uses_it() -> None:
    assert symbol_by_name(application.Beat().scheduler_cls) is Scheduler  # type: ignore[no-untyped-call]
