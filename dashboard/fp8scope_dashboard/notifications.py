"""Telling the rest of the system that a run changed: open pages by Redis channels, jobs by Celery.

The one place where a request's work meets Redis. A request only leaves a note; a thread of this process
carries it over. So Redis may be slow, hang or be gone: no request waits for it or fails by it. What is lost
that way is found again by the sweepers of alerts and analysis, and by the pages when they reconnect.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Literal
from uuid import UUID

import redis
from celery import current_app
from django.conf import settings
from django.db import transaction
from redis.backoff import NoBackoff
from redis.retry import Retry

logger = logging.getLogger(__name__)

Kind = Literal[
    "rows", "histogram", "evaluation", "alert", "comparison", "state", "tensors", "command", "report"
]

# The jobs that new data calls for, by name: this module must not import those that import it.
EVALUATE_RUN = "fp8scope_dashboard.alerts.tasks.evaluate_run"
COMPARE_RUN = "fp8scope_dashboard.analysis.tasks.compare_run"
JOBS: dict[Kind, tuple[str, ...]] = {
    "rows": (EVALUATE_RUN, COMPARE_RUN),
    "evaluation": (COMPARE_RUN,),
    "state": (EVALUATE_RUN, COMPARE_RUN),
}
# A job starts this long after the change that called for it; changes in between need no job of their own.
# The mark that says "one is due" must be gone before the job reads, or the last change would be missed.
JOB_DELAY_SECONDS = 1.0
JOB_MARK_MILLISECONDS = 900
# After a failure Redis is left alone for this long.
PAUSE_SECONDS = 5.0
# The least time between two trips to Redis: notes of many batches in between are carried as one.
GAP_SECONDS = 0.05
# Notes kept while Redis is away; beyond it they are dropped, as the sweepers do not need them.
NOTES_KEPT = 10_000


def run_channel(run_id: UUID | str) -> str:
    """The Redis channel that carries the changes of one run."""
    return f"fp8scope:run:{run_id}"


def project_channel(project_id: int) -> str:
    """The Redis channel that carries the changes of all runs of a project."""
    return f"fp8scope:project:{project_id}"


def run_changed(run_id: UUID, project_id: int, kind: Kind, step: int | None = None) -> None:
    """Announce a change once the current transaction has committed (at once when there is none).

    Publishes {"run", "kind", "step"} on the run's and the project's channel and has the jobs started that
    the kind of change calls for, each run's at most about once a second. Never raises and never waits.
    """
    transaction.on_commit(lambda: _courier().leave(run_id, project_id, kind, step))


def flush(timeout: float = 5.0) -> bool:
    """Wait until every note left so far was carried over (or dropped). For tests and for shutdown."""
    return _courier().flush(timeout)


class Courier:
    """Carries notes to Redis on a thread of its own. Notes of the same run and kind are carried as one."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(
            url, socket_connect_timeout=1.0, socket_timeout=2.0, retry=Retry(NoBackoff(), 0)
        )
        self._notes: dict[tuple[UUID, int, Kind], int | None] = {}
        self._changed = threading.Condition()
        self._carrying = False
        self._resume_at = 0.0
        self._failing = False
        threading.Thread(target=self._work, name="fp8scope-events", daemon=True).start()

    def leave(self, run_id: UUID, project_id: int, kind: Kind, step: int | None) -> None:
        """Leave a note; the newest step of a kind wins."""
        with self._changed:
            note = (run_id, project_id, kind)
            if note in self._notes or len(self._notes) < NOTES_KEPT:
                self._notes[note] = step
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._notes and not self._carrying, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._notes))
                notes, self._notes = self._notes, {}
                self._carrying = True
            try:
                if time.monotonic() >= self._resume_at:
                    self._carry(notes)
            finally:
                with self._changed:
                    self._carrying = False
                    self._changed.notify_all()
            time.sleep(GAP_SECONDS)

    def _carry(self, notes: dict[tuple[UUID, int, Kind], int | None]) -> None:
        try:
            for (run_id, project_id, kind), step in notes.items():
                message = json.dumps({"run": str(run_id), "kind": kind, "step": step})
                self._client.publish(run_channel(run_id), message)
                self._client.publish(project_channel(project_id), message)
                for job in JOBS.get(kind, ()):
                    self._start(job, run_id)
        except (
            Exception
        ) as error:  # whatever Redis or Celery raise: telemetry is stored, and that is what counts
            self._resume_at = time.monotonic() + PAUSE_SECONDS
            if not self._failing:
                logger.warning("Redis is away (%s): pages and jobs catch up later.", type(error).__name__)
            self._failing = True
        else:
            if self._failing:
                logger.info("Redis is back.")
            self._failing = False

    def _start(self, job: str, run_id: UUID) -> None:
        due = f"fp8scope:due:{job}:{run_id}"
        if self._client.set(due, 1, px=JOB_MARK_MILLISECONDS, nx=True):
            current_app.send_task(job, args=[str(run_id)], countdown=JOB_DELAY_SECONDS)


_lock = threading.Lock()
_couriers: dict[int, Courier] = {}


def _courier() -> Courier:
    # One per process: a thread does not survive a fork.
    with _lock:
        if os.getpid() not in _couriers:
            _couriers.clear()
            _couriers[os.getpid()] = Courier(settings.REDIS_URL)
        return _couriers[os.getpid()]
