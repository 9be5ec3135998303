"""Celery tasks: each parses ids and calls a plain function."""

from typing import Any
from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.analysis import comparison_runs, services
from fp8scope_dashboard.notifications import (
    COMPARE_WAITING,
    COMPARED_RUNS,
    job_started,
    redis_client,
    start_once,
)

RUNS_AT_ONCE = 500


@shared_task  # type: ignore[untyped-decorator]
def compare_run(run_id: str) -> None:
    """Update the comparisons that a run takes part in."""
    services.refresh(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def compare_waiting() -> None:
    """Start a job for each changed run that takes part in comparisons; most runs take part in none."""
    client = redis_client()
    # Before looking, so that runs that change from now on start another task.
    job_started(COMPARE_WAITING)
    while True:
        taken: Any = client.zpopmin(COMPARED_RUNS, RUNS_AT_ONCE)
        if not taken:
            return
        for run_id in comparison_runs.compared_among([UUID(member.decode()) for member, _ in taken]):
            start_once(client, compare_run.name, run_id, delay=None)


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start the comparisons whose Celery messages were lost."""
    for run_id in comparison_runs.uncompared_runs():
        compare_run.delay(str(run_id))
