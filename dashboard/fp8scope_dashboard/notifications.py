"""Announce changes of runs: to open pages over Redis channels, and to Celery jobs.

This is the only place where a request uses Redis, and a dedicated thread of each process does the work. So
Redis may be slow, hang or be down: no request waits for it or fails because of it. The sweeps of alerts and
analysis, and pages when they reconnect, recover whatever is lost.

Runs with new rows wait in sorted sets of Redis, each at most once. One task takes many of them, so that the
cost of a task does not grow with the number of runs, and so that workers that are busy fall behind by a
bounded time. `alerts/detection/evaluator.py` and `analysis/tasks.py` take them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

import redis
from celery import current_app
from django.conf import settings
from django.db import transaction

from fp8scope_dashboard.db.redis_client import bounded_client

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
    "console",
    "note",
    "media",
]

# The tasks that changes start. By name, because the tasks' modules import this one.
EVALUATE_WAITING: Final = "fp8scope_dashboard.alerts.tasks.evaluate_waiting"
COMPARE_WAITING: Final = "fp8scope_dashboard.analysis.tasks.compare_waiting"
COMPARE_RUN: Final = "fp8scope_dashboard.analysis.tasks.compare_run"
DIAGNOSE_RUN: Final = "fp8scope_dashboard.diagnosis.tasks.diagnose_run"
# Jobs of one run.
RUN_JOBS: Final = frozenset({COMPARE_RUN, DIAGNOSE_RUN})
# The kinds of changes after which a run is evaluated by the detectors, or compared.
EVALUATED: Final = frozenset({"rows", "state"})
COMPARED: Final = frozenset({"rows", "evaluation", "state"})
# Of each job at most one waits for a run. Its mark is removed when it starts, before it reads, so that it
# misses no change. A mark whose job was lost expires after this long.
JOB_MARK_SECONDS: Final = 30
# Comparisons and diagnoses start this long after the change, so that one serves all changes in between.
JOB_DELAY_SECONDS: Final = 1.0
# The sorted sets of waiting runs. The score is when a run began to wait, in Unix seconds.
URGENT_RUNS: Final = "fp8scope:evaluate:urgent"
WAITING_RUNS: Final = "fp8scope:evaluate:waiting"
COMPARED_RUNS: Final = "fp8scope:compare:waiting"
# An evaluator takes all waiting runs, so many at once. Another one starts for each further so many, up to a
# number: on busy cores one falls behind, and several get more of them.
RUNS_PER_EVALUATOR: Final = 16
MAX_EVALUATORS: Final = 4
# When each kind of change was last published on a channel is known for this long.
RECENT_SECONDS: Final = 600
# Redis is not tried again for this long after a failure.
PAUSE_SECONDS = 5.0
# The shortest time between two round trips to Redis; changes in between are published together.
MIN_INTERVAL_SECONDS = 0.05
# Changes that wait while Redis is down; further ones are dropped and left to the sweeps.
MAX_WAITING = 10_000

# Announces many changes in one command, because a client of Redis in Python takes longer to compose a command
# than Redis to carry it out. What changed is noted before it is published: a page that subscribes in between
# reads it there. Returns how many runs wait for the detectors, and of each evaluator 1 if it runs, else 0.
_ANNOUNCE: Final = """
local announced, now, seconds = cjson.decode(ARGV[1]), ARGV[2], ARGV[3]
for number, name in ipairs({'urgent', 'evaluated', 'compared'}) do
    for _, run in ipairs(announced[name]) do redis.call('ZADD', KEYS[number], 'NX', now, run) end
end
for _, change in ipairs(announced.changes) do
    for _, channel in ipairs(change[1]) do
        local recent = channel .. ':recent'
        redis.call('HSET', recent, change[2], now)
        redis.call('EXPIRE', recent, seconds)
    end
    for _, channel in ipairs(change[1]) do redis.call('PUBLISH', channel, change[3]) end
end
local answer = {redis.call('ZCARD', KEYS[1]) + redis.call('ZCARD', KEYS[2])}
for number = 4, #KEYS do answer[number - 2] = redis.call('EXISTS', KEYS[number]) end
return answer
"""

ChangeKey = tuple[UUID, int, ChangeKind]


@dataclass(frozen=True)
class _Change:
    step: int | None
    urgent: bool


def run_channel(run_id: UUID | str) -> str:
    """The Redis channel for changes of one run."""
    return f"fp8scope:run:{run_id}"


def project_channel(project_id: int) -> str:
    """The Redis channel for changes of all runs of a project."""
    return f"fp8scope:project:{project_id}"


def recent_key(channel: str) -> str:
    """The key of the kinds of changes on a channel, each with the Unix time of the last one, in seconds."""
    return f"{channel}:recent"


def run_changed(
    run_id: UUID, project_id: int, kind: ChangeKind, step: int | None = None, *, urgent: bool = False
) -> None:
    """Announce a change once the current transaction commits, or at once outside a transaction.

    Publishes {"run", "kind", "step"} on the channels of the run and of the project, and starts the jobs for
    this kind of change. Detectors read an `urgent` run before all others. Never raises and never blocks.
    """
    transaction.on_commit(lambda: _publisher().put(run_id, project_id, kind, step, urgent=urgent))


def flush(timeout: float = 5.0) -> bool:
    """Wait until all changes announced so far are published or dropped. Returns False on a timeout."""
    return _publisher().flush(timeout)


def job_started(job: str, run_id: str = "") -> None:
    """Let later changes (of the run) start another job. A worker calls it before a job reads."""
    _publisher().job_started(job, run_id)


def enqueue_evaluations(client: redis.Redis, run_ids: Collection[UUID], *, urgent: bool = False) -> None:
    """Let the detectors read these runs, in their turn; `urgent` ones before others.

    Raises:
        redis.RedisError, kombu.exceptions.OperationalError: Redis is unavailable.
    """
    for name in (WAITING_RUNS, *([URGENT_RUNS] if urgent else [])) if run_ids else ():
        client.zadd(name, {str(run_id): time.time() for run_id in run_ids}, nx=True)
    start_evaluators(client)


def start_evaluators(client: redis.Redis) -> None:
    """Start as many evaluators as the waiting runs need, unless they run already.

    Raises:
        redis.RedisError, kombu.exceptions.OperationalError: Redis is unavailable.
    """
    with client.pipeline(transaction=False) as commands:
        commands.zcard(WAITING_RUNS)
        commands.zcard(URGENT_RUNS)
        commands.mget(_EVALUATOR_KEYS)
        waiting, urgent, marks = commands.execute()
    _start_missing(client, waiting + urgent, [mark is not None for mark in marks])


def _start_missing(client: redis.Redis, waiting: int, marks: Sequence[object]) -> None:
    """Start the evaluators that so many waiting runs need; `marks`: those that run."""
    needed = min(MAX_EVALUATORS, -(-waiting // RUNS_PER_EVALUATOR))
    for slot in range(needed):
        if not marks[slot] and client.set(_EVALUATOR_KEYS[slot], "due", ex=JOB_MARK_SECONDS, nx=True):
            current_app.send_task(EVALUATE_WAITING, args=[slot])


def start_once(
    client: redis.Redis, job: str, run_id: UUID | str, delay: float | None = JOB_DELAY_SECONDS
) -> None:
    """Start a job of a run after `delay` seconds, unless one waits already.

    Raises:
        redis.RedisError, kombu.exceptions.OperationalError: Redis is unavailable.
    """
    if client.set(waiting_key(job, run_id), 1, ex=JOB_MARK_SECONDS, nx=True):
        current_app.send_task(job, args=[str(run_id)], countdown=delay)


def redis_client() -> redis.Redis:
    """A client that fails fast and never retries."""
    return _client(settings.REDIS_URL)


class Publisher:
    """Publishes changes to Redis on its own thread.

    Of several waiting changes with the same run and kind only the last is published.
    """

    def __init__(self, url: str, *, max_waiting: int = MAX_WAITING, start: bool = True) -> None:
        self._client = _client(url)
        self._announce = self._client.register_script(_ANNOUNCE)
        self._max_waiting = max_waiting
        self._waiting: dict[ChangeKey, _Change] = {}
        self._changed = threading.Condition()
        self._publishing = False
        self._resume_at = 0.0
        self._failing = False
        if start:
            threading.Thread(target=self._work, name="fp8scope-events", daemon=True).start()

    @property
    def waiting(self) -> dict[ChangeKey, int | None]:
        """The step of each waiting change, by run, project and kind."""
        with self._changed:
            return {key: change.step for key, change in self._waiting.items()}

    def put(
        self, run_id: UUID, project_id: int, kind: ChangeKind, step: int | None, *, urgent: bool = False
    ) -> None:
        """Queue a change; it replaces a waiting one of the same run and kind, and stays urgent if that is."""
        with self._changed:
            key = (run_id, project_id, kind)
            before = self._waiting.get(key)
            if before is not None or len(self._waiting) < self._max_waiting:
                self._waiting[key] = _Change(step, urgent or (before is not None and before.urgent))
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

    def _publish(self, changes: Mapping[ChangeKey, _Change]) -> None:
        try:
            self._send(changes)
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

    def _send(self, changes: Mapping[ChangeKey, _Change]) -> None:
        """Publish all changes and queue their runs in one round trip, then start what they need."""
        urgent = [str(run) for (run, _, _), change in changes.items() if change.urgent]
        evaluated = {*urgent, *(str(run) for run, _, kind in changes if kind in EVALUATED)}
        compared = {str(run) for run, _, kind in changes if kind in COMPARED}
        announced = {
            "urgent": urgent,
            "evaluated": list(evaluated),
            "compared": list(compared),
            "changes": [
                [
                    (run_channel(run), project_channel(project)),
                    kind,
                    json.dumps({"run": str(run), "kind": kind, "step": change.step}),
                ]
                for (run, project, kind), change in changes.items()
            ],
        }
        arguments = [json.dumps(announced), repr(time.time()), str(RECENT_SECONDS)]
        waiting, *marks = self._announce(_ANNOUNCE_KEYS, arguments)
        if evaluated:
            _start_missing(self._client, waiting, marks)
        if compared and self._client.set(waiting_key(COMPARE_WAITING), 1, ex=JOB_MARK_SECONDS, nx=True):
            current_app.send_task(COMPARE_WAITING, countdown=JOB_DELAY_SECONDS)
        for run_id, _, kind in changes:
            # Somebody asks for the diagnosis; runs in trouble are diagnosed by a sweep.
            if kind == "diagnosis":
                start_once(self._client, DIAGNOSE_RUN, run_id)

    def job_started(self, job: str, run_id: str) -> None:
        """See `job_started`."""
        with suppress(redis.RedisError):
            self._client.delete(waiting_key(job, run_id))


def waiting_key(job: str, run_id: UUID | str = "") -> str:
    """The key that exists while a job (of a run) waits to be started."""
    return f"fp8scope:due:{job}:{run_id}"


def evaluator_key(slot: int) -> str:
    """The key that exists while the evaluator with this number runs, or waits to be started."""
    return f"fp8scope:evaluator:{slot}"


_EVALUATOR_KEYS: Final = [evaluator_key(slot) for slot in range(MAX_EVALUATORS)]
_ANNOUNCE_KEYS: Final = [URGENT_RUNS, WAITING_RUNS, COMPARED_RUNS, *_EVALUATOR_KEYS]


def _client(url: str) -> redis.Redis:
    return bounded_client(url, 1.0, 2.0)


_lock = threading.Lock()
_publishers: dict[int, Publisher] = {}


def _publisher() -> Publisher:
    # By process id, because threads do not survive a fork.
    with _lock:
        if os.getpid() not in _publishers:
            _publishers.clear()
            _publishers[os.getpid()] = Publisher(settings.REDIS_URL)
        return _publishers[os.getpid()]
