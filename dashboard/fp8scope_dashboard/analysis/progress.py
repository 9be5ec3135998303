"""Show on a page how far a long job is.

A job reports the stage that it begins and the share that is done:

    with progress(run.id, "comparison") as report:
        report("Reading the losses", 0.0)
        report("Comparing", 0.8)

The row of a job exists only while the job runs, and only once it has run for SHOWN_AFTER seconds, so that a
short job writes nothing. Rows are best effort: a job never fails because its progress cannot be stored. Call
it outside a transaction, or no page sees the rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final
from uuid import UUID, uuid4

from django.db import DatabaseError, transaction
from django.utils import timezone

from fp8scope_dashboard.analysis.models import JobProgress
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run

logger = logging.getLogger(__name__)

ReportStage = Callable[[str, float], None]
"""Called with the stage that begins and the share of the job that is done, from 0 to 1."""

# A job that takes longer than this shows its progress, at most once every INTERVAL.
SHOWN_AFTER: Final = 2.0
INTERVAL: Final = 1.0
# The job of an older row was killed.
LOST_AFTER: Final = timedelta(minutes=15)


@contextmanager
def progress(run_id: UUID, kind: str, *, expected_seconds: float = 0.0) -> Iterator[ReportStage]:
    """Store the progress of a job of a run while the body runs; see the module.

    Args:
        kind: names the job on the page, such as "comparison". A run has one row per kind: of two jobs at the
            same time, the page shows the later one.
        expected_seconds: how long the job took the last time. A job that is expected to be long shows its
            progress from the start, even if its first stage is the long one.
    """
    job = _Job(run_id, kind, expected_seconds)
    try:
        yield job.report
    finally:
        job.end()


def running_jobs(run_ids: Iterable[UUID]) -> list[JobProgress]:
    """The long jobs of these runs that are running now, oldest first."""
    recent = JobProgress.objects.filter(run__in=list(run_ids), updated_at__gt=timezone.now() - LOST_AFTER)
    named = recent.select_related("run").only(
        "run__name", "kind", "stage", "share", "started_at", "updated_at"
    )
    return list(named.order_by("started_at", "pk"))


class _Job:
    """Writes the row of one job."""

    def __init__(self, run_id: UUID, kind: str, expected_seconds: float) -> None:
        self._run_id, self._kind, self._id = run_id, kind, uuid4()
        self._began, self._started_at = time.monotonic(), timezone.now()
        self._next = self._began + (0.0 if expected_seconds >= SHOWN_AFTER else SHOWN_AFTER)
        self._is_shown = False

    def report(self, stage: str, share: float) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL
        values = {
            "job": self._id,
            "stage": stage[:128],
            "share": min(1.0, max(0.0, share)),
            "started_at": self._started_at,
            "updated_at": timezone.now(),
        }
        try:
            # Its own savepoint, so that a failure leaves a transaction of the caller intact.
            with transaction.atomic():
                JobProgress.objects.update_or_create(run_id=self._run_id, kind=self._kind, defaults=values)
        except DatabaseError as error:
            logger.warning("The progress of a job cannot be stored (%s).", type(error).__name__)
            return
        self._is_shown = True
        self._announce()

    def end(self) -> None:
        if not self._is_shown:
            return
        with suppress(DatabaseError):
            JobProgress.objects.filter(run_id=self._run_id, kind=self._kind, job=self._id).delete()
            self._announce()

    def _announce(self) -> None:
        project_id = Run.objects.filter(pk=self._run_id).values_list("project_id", flat=True).first()
        if project_id is not None:
            run_changed(self._run_id, project_id, "progress")
