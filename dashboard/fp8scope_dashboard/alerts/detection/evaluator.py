"""Evaluate the runs that wait, urgent ones first, as long as there are any.

`notifications` starts an evaluator when a run begins to wait, and more of them if many do. An evaluator takes
many runs at once. It stays for a moment when none is left, so that runs that stream need no new task for each
batch. The sets of waiting runs may be lost with Redis: a sweep finds the runs again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID, uuid4

import redis
from django.conf import settings
from django.db import InterfaceError, OperationalError, close_old_connections

from fp8scope_dashboard.alerts.delivery import outbox
from fp8scope_dashboard.alerts.detection import run_detection
from fp8scope_dashboard.db.redis_client import bounded_client
from fp8scope_dashboard.notifications import (
    URGENT_RUNS,
    WAITING_RUNS,
    enqueue_evaluations,
    evaluator_key,
    start_evaluators,
)

logger = logging.getLogger(__name__)

RUNS_AT_ONCE: Final = 16
# Of urgent runs, most of which open alerts: the first is not sent before the last is written.
MAX_URGENT_AT_ONCE: Final = 8
# After urgent runs come those that have waited for longer: otherwise they would wait as long as others fail.
OVERDUE_SECONDS: Final = 0.5
# Rounds over runs that are not urgent take at most this share of the time, and begin at most PACE_SECONDS
# apart: the longer one takes, the more runs the next one serves.
MAX_SHARE: Final = 0.25
PACE_SECONDS: Final = 0.2
LINGER_SECONDS: Final = 1.0
# If other evaluators have all runs that were taken, they are taken again after this pause.
BUSY_SECONDS: Final = 0.05
# Then the task ends and the next one continues, so that workers can stop, or replace a process.
TURN_SECONDS: Final = 5.0
# The mark of an evaluator that was killed expires after this long.
MARK_SECONDS: Final = 10


def work(slot: int) -> int:
    """Evaluate waiting runs until none is left or the turn is over; returns how many evaluations it made."""
    client = bounded_client(settings.REDIS_URL, 1.0, LINGER_SECONDS + 2.0)
    key, mine, count = evaluator_key(slot), uuid4().hex.encode(), 0
    end, next_round, is_urgent = time.monotonic() + TURN_SECONDS, 0.0, False
    with client, outbox.sending_at_once():
        try:
            client.set(key, mine, ex=MARK_SECONDS)
            # Another evaluator has the slot if this one waited for too long.
            while time.monotonic() < end and client.get(key) in (mine, None):
                client.set(key, mine, ex=MARK_SECONDS)
                pause = next_round - time.monotonic()
                run_ids, is_urgent = take(client, pause, prefers_overdue=is_urgent)
                if not run_ids and pause <= 0.0:
                    break
                begin = time.monotonic()
                if more := evaluate_all(run_ids):
                    # Of an urgent run, the rows that make it so may be those that are still to be read.
                    enqueue_evaluations(client, more, urgent=is_urgent)
                    if len(more) == len(run_ids):
                        time.sleep(BUSY_SECONDS)
                if run_ids and not is_urgent and len(run_ids) < RUNS_AT_ONCE:
                    next_round = begin + min(PACE_SECONDS, (time.monotonic() - begin) / MAX_SHARE)
                count += len(run_ids)
        finally:
            if client.get(key) == mine:
                client.delete(key)
        # For runs that began to wait after the last look, when the mark still prevented another evaluator.
        start_evaluators(client)
    return count


def take(client: redis.Redis, pause: float, *, prefers_overdue: bool = False) -> tuple[list[UUID], bool]:
    """Take the next waiting runs, and whether they are urgent; waits for them if there are none.

    Args:
        pause: for so many seconds take only urgent runs.
        prefers_overdue: take others first that have waited for OVERDUE_SECONDS.
    """
    names = [URGENT_RUNS] if pause > 0.0 else [URGENT_RUNS, WAITING_RUNS]
    if prefers_overdue and client.zcount(WAITING_RUNS, 0, time.time() - OVERDUE_SECONDS):
        names, pause = [WAITING_RUNS, URGENT_RUNS], 0.0
    first: Any = client.bzpopmin(names, timeout=pause if pause > 0.0 else LINGER_SECONDS)
    if first is None:
        return [], False
    name, member, _ = first
    is_urgent = name.decode() == URGENT_RUNS
    more: Any = client.zpopmin(name, (MAX_URGENT_AT_ONCE if is_urgent else RUNS_AT_ONCE) - 1)
    members = [member, *(run_id for run_id, _ in more)]
    client.zrem(WAITING_RUNS if is_urgent else URGENT_RUNS, *members)
    return [UUID(run_id.decode()) for run_id in members], is_urgent


def evaluate_all(run_ids: Sequence[UUID]) -> list[UUID]:
    """Evaluate runs together; if that fails, each by itself. Returns those that must be evaluated again.

    They have more rows to read, or another worker evaluates them now, perhaps without their latest rows.

    Raises:
        OperationalError, InterfaceError: the database is unavailable.
    """
    close_old_connections()
    if not run_ids:
        return []
    try:
        evaluated = run_detection.evaluate_together(run_ids)
        return [*evaluated.more, *evaluated.busy]
    except (OperationalError, InterfaceError):
        raise
    except Exception:
        if len(run_ids) == 1:
            logger.exception("Run %s could not be evaluated.", run_ids[0])
            return []
    return [run_id for queued_id in run_ids for run_id in evaluate_all([queued_id])]
