"""Announce changes of runs: to open pages over Redis channels, and to Celery jobs.

This is the only place where a request uses Redis, and a dedicated thread of each process does the work. So
Redis may be slow, hang or be down: no request waits for it or fails because of it. The sweeps of alerts and
analysis, and pages when they reconnect, recover whatever is lost.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import suppress
from typing import Literal
from uuid import UUID

import redis
from celery import current_app
from django.conf import settings
from django.db import transaction
from redis.backoff import NoBackoff
from redis.retry import Retry

logger = logging.getLogger(__name__)

ChangeKind = Literal[
    "rows",
    "histogram",
    "evaluation",
    "alert",
    "comparison",
    "diagnosis",
    "progress",
    "state",
    "tensors",
    "command",
    "report",
]

# The jobs that each kind of change starts. By name, because the tasks' modules import this one.
EVALUATE_RUN = "fp8scope_dashboard.alerts.tasks.evaluate_run"
COMPARE_RUN = "fp8scope_dashboard.analysis.tasks.compare_run"
DIAGNOSE_RUN = "fp8scope_dashboard.diagnosis.tasks.diagnose_run"
JOBS: dict[ChangeKind, tuple[str, ...]] = {
    "rows": (EVALUATE_RUN, COMPARE_RUN),
    "evaluation": (COMPARE_RUN,),
    "state": (EVALUATE_RUN, COMPARE_RUN),
    # Somebody asks for the diagnosis; runs in trouble are diagnosed by a sweep.
    "diagnosis": (DIAGNOSE_RUN,),
}
# Of each job at most one waits for a run. Its mark is removed when it starts, before it reads, so that it
# misses no change. A mark whose job was lost expires after this long.
JOB_MARK_SECONDS = 30
# Most jobs start this long after the change, so that one job serves all changes in between.
JOB_DELAY_SECONDS = 1.0
# These start at once, since an alert waits for them; the next one of the run starts this long after.
PROMPT_JOBS = frozenset({EVALUATE_RUN})
PROMPT_SPACING_MILLISECONDS = 500
# Redis is not tried again for this long after a failure.
PAUSE_SECONDS = 5.0
# The shortest time between two round trips to Redis; changes in between are published together.
MIN_INTERVAL_SECONDS = 0.05
# Changes that wait while Redis is down; further ones are dropped and left to the sweeps.
MAX_WAITING = 10_000


def run_channel(run_id: UUID | str) -> str:
    """The Redis channel for changes of one run."""
    return f"fp8scope:run:{run_id}"


def project_channel(project_id: int) -> str:
    """The Redis channel for changes of all runs of a project."""
    return f"fp8scope:project:{project_id}"


def run_changed(run_id: UUID, project_id: int, kind: ChangeKind, step: int | None = None) -> None:
    """Announce a change once the current transaction commits, or at once outside a transaction.

    Publishes {"run", "kind", "step"} on the channels of the run and of the project, and starts the jobs for
    this kind of change, each at most once or twice a second per run, less often if workers are busy. Never
    raises and never blocks.
    """
    transaction.on_commit(lambda: _publisher().put(run_id, project_id, kind, step))


def flush(timeout: float = 5.0) -> bool:
    """Wait until all changes announced so far are published or dropped. Returns False on a timeout."""
    return _publisher().flush(timeout)


def job_started(job: str, run_id: str) -> None:
    """Let later changes of the run start another job. A worker calls it before a job reads."""
    _publisher().job_started(job, run_id)


class Publisher:
    """Publishes changes to Redis on its own thread.

    Of several waiting changes with the same run and kind only the last is published.
    """

    def __init__(self, url: str, *, max_waiting: int = MAX_WAITING, start: bool = True) -> None:
        self._client = redis.Redis.from_url(
            url, socket_connect_timeout=1.0, socket_timeout=2.0, retry=Retry(NoBackoff(), 0)
        )
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[UUID, int, ChangeKind], int | None] = {}
        self._changed = threading.Condition()
        self._publishing = False
        self._resume_at = 0.0
        self._failing = False
        if start:
            threading.Thread(target=self._work, name="fp8scope-events", daemon=True).start()

    @property
    def waiting(self) -> dict[tuple[UUID, int, ChangeKind], int | None]:
        """The step of each waiting change, by run, project and kind."""
        with self._changed:
            return dict(self._waiting)

    def put(self, run_id: UUID, project_id: int, kind: ChangeKind, step: int | None) -> None:
        """Queue a change; it replaces a waiting one of the same run and kind."""
        with self._changed:
            change = (run_id, project_id, kind)
            if change in self._waiting or len(self._waiting) < self._max_waiting:
                self._waiting[change] = step
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until no change is waiting. Returns False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._publishing, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                changes, self._waiting = self._waiting, {}
                self._publishing = True
            try:
                if time.monotonic() >= self._resume_at:
                    self._publish(changes)
            finally:
                with self._changed:
                    self._publishing = False
                    self._changed.notify_all()
            time.sleep(MIN_INTERVAL_SECONDS)

    def _publish(self, changes: dict[tuple[UUID, int, ChangeKind], int | None]) -> None:
        try:
            for (run_id, project_id, kind), step in changes.items():
                message = json.dumps({"run": str(run_id), "kind": kind, "step": step})
                self._client.publish(run_channel(run_id), message)
                self._client.publish(project_channel(project_id), message)
                for job in JOBS.get(kind, ()):
                    self._start(job, run_id)
        # Any failure of Redis or Celery: the telemetry itself is stored already.
        except Exception as error:
            self._resume_at = time.monotonic() + PAUSE_SECONDS
            if not self._failing:
                logger.warning(
                    "Redis is unavailable (%s): pages and jobs catch up later.", type(error).__name__
                )
            self._failing = True
        else:
            if self._failing:
                logger.info("Redis is available again.")
            self._failing = False

    def _start(self, job: str, run_id: UUID) -> None:
        if not self._client.set(_waiting_key(job, run_id), 1, ex=JOB_MARK_SECONDS, nx=True):
            return
        delay = JOB_DELAY_SECONDS
        if job in PROMPT_JOBS:
            delay = max(0, int(self._client.pttl(_started_key(job, run_id)))) / 1000.0
        # Without a delay the task is not held back in a worker's timer.
        current_app.send_task(job, args=[str(run_id)], countdown=delay or None)

    def job_started(self, job: str, run_id: str) -> None:
        """See `job_started`."""
        with suppress(redis.RedisError), self._client.pipeline(transaction=False) as commands:
            commands.delete(_waiting_key(job, run_id))
            commands.set(_started_key(job, run_id), 1, px=PROMPT_SPACING_MILLISECONDS)
            commands.execute()


def _waiting_key(job: str, run_id: UUID | str) -> str:
    """The key that exists while a job of the run waits to be started."""
    return f"fp8scope:due:{job}:{run_id}"


def _started_key(job: str, run_id: UUID | str) -> str:
    """The key that exists for a while after a job of the run was started."""
    return f"fp8scope:started:{job}:{run_id}"


_lock = threading.Lock()
_publishers: dict[int, Publisher] = {}


def _publisher() -> Publisher:
    # By process id, because threads do not survive a fork.
    with _lock:
        if os.getpid() not in _publishers:
            _publishers.clear()
            _publishers[os.getpid()] = Publisher(settings.REDIS_URL)
        return _publishers[os.getpid()]
