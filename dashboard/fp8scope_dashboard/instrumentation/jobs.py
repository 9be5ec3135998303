"""Measure the jobs of a worker, and give their log lines a context. Importing it connects it to Celery."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextvars import Token
from typing import Any, Final

import redis
from celery import Task
from celery.signals import before_task_publish, task_postrun, task_prerun, worker_process_shutdown

from fp8scope_dashboard.instrumentation import log_context, metrics
from fp8scope_dashboard.instrumentation.tracing import JobSpan, tracer
from fp8scope_dashboard.notifications import RUN_JOBS

logger = logging.getLogger(__name__)

QUEUED_AT: Final = "fp8scope_queued_at"
"""The header of a task with the time at which it was queued, in seconds since 1970."""
REQUEST: Final = "fp8scope_request"
"""The header with the id of the request that queued it."""

_running: dict[str, tuple[float, Token[Any], JobSpan | None]] = {}


@before_task_publish.connect  # type: ignore[untyped-decorator]
def note_queueing(headers: dict[str, Any] | None = None, **_: Any) -> None:
    """Note when a task is queued, and by which request."""
    if headers is not None:
        headers[QUEUED_AT] = time.time()
        if request := log_context.context.get().get("request"):
            headers[REQUEST] = request
        tracer.inject(headers)


@task_prerun.connect  # type: ignore[untyped-decorator]
def note_start(task_id: str, task: Task, args: Sequence[object], **_: Any) -> None:
    """Begin to measure a job."""
    name = short_name(task.name)
    fields = {"task": name, "job": task_id}
    if task.name in RUN_JOBS and args:
        fields["run"] = str(args[0])
    # A header that other versions of the server do not send.
    if request := getattr(task.request, REQUEST, None):
        fields["request"] = str(request)[:64]
    carrier = {key: str(getattr(task.request, key, "") or "") for key in ("traceparent", "tracestate")}
    span = tracer.begin_job(name, carrier, {f"fp8scope.{field}": value for field, value in fields.items()})
    _running[task_id] = (time.perf_counter(), log_context.context.set(fields), span)
    if isinstance(queued_at := getattr(task.request, QUEUED_AT, None), int | float):
        metrics.JOB_WAIT.observe(max(0.0, time.time() - queued_at), name)


@task_postrun.connect  # type: ignore[untyped-decorator]
def note_end(task_id: str, task: Task, state: str | None = None, **_: Any) -> None:
    """Count a job that has ended."""
    if (begun := _running.pop(task_id, None)) is None:
        return
    began, token, span = begun
    log_context.context.reset(token)
    name, ended = short_name(task.name), (state or "unknown").lower()
    if span is not None:
        span.end(ended)
    metrics.JOBS.add(name, ended)
    metrics.JOB_DURATION.observe(time.perf_counter() - began, name)


@worker_process_shutdown.connect  # type: ignore[untyped-decorator]
def send_last_counts(**_: Any) -> None:
    """Hand over what a process has counted in its last second."""
    try:
        metrics.counts.swap()
    except redis.RedisError as error:
        logger.debug("The last counts of a process are lost, because Redis does not answer: %s", error)


def short_name(task: str) -> str:
    """The name of a task without the package: `alerts.sweep` of `fp8scope_dashboard.alerts.tasks.sweep`."""
    return task.removeprefix("fp8scope_dashboard.").replace(".tasks.", ".")
