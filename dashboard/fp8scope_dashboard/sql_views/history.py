"""Copy the history of scalars into a table that SQL reads, for runs that have changed.

Nothing is copied until a login has been made. A copy is bounded in points, scalars and time, and is made by a
job, so that ingest does not wait for it. Live runs are copied once a minute, large ones less often.
"""

from __future__ import annotations

import time
from datetime import UTC
from typing import Any, Final
from uuid import UUID

import numpy as np
from django.db import connection, transaction
from django.utils import timezone
from numpy.typing import NDArray

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.sql_views.models import HistoryState, ScalarHistory, SqlReader
from fp8scope_dashboard.telemetry import queries

POINTS: Final = 1_000
"""Points and buckets of a scalar; a few buckets more where the range of steps is no power of two."""
MAX_SCALARS: Final = 200
"""Scalars of a run: the loss, then the others by their names."""
MIN_SECONDS: Final = 60.0
# A run whose copy takes a second is copied every hundred.
SHARE: Final = 0.01
SECONDS_AT_ONCE: Final = 20.0
MAX_RUNS: Final = 500

DUE: Final = """
SELECT run.id FROM runs_run AS run
LEFT JOIN sql_views_historystate AS state ON state.run_id = run.id
WHERE run.deleted_at IS NULL AND run.rows_stored > 0
    AND EXISTS (SELECT FROM sql_views_sqlreader WHERE project_id IS NULL OR project_id = run.project_id)
    AND (state.run_id IS NULL OR state.rows_stored <> run.rows_stored AND state.copied_at
        < now() - make_interval(secs => greatest(%(least)s, state.seconds / %(share)s)))
ORDER BY state.copied_at NULLS FIRST, run.created_at DESC LIMIT %(runs)s
"""


def copy_due() -> int:
    """Copy the runs that are due, for at most SECONDS_AT_ONCE. Returns their number."""
    if not SqlReader.objects.exists():
        return 0
    with connection.cursor() as cursor:
        cursor.execute(DUE, {"least": MIN_SECONDS, "share": SHARE, "runs": MAX_RUNS})
        due: list[UUID] = [run_id for (run_id,) in cursor.fetchall()]
    copied, deadline = 0, time.monotonic() + SECONDS_AT_ONCE
    for run_id in due:
        copied += copy_run(run_id)
        if time.monotonic() > deadline:
            break
    return copied


def copy_run(run_id: UUID) -> bool:
    """Copy the history of a run. Returns False if there is no such run."""
    run = Run.objects.filter(pk=run_id).only("rows_stored", "last_scalars").first()
    if run is None:
        return False
    began = time.monotonic()
    rows = _read(run)
    with transaction.atomic():
        if not _hold(run_id):
            return False
        ScalarHistory.objects.filter(run=run_id).delete()
        ScalarHistory.objects.bulk_create(rows, batch_size=50)
        HistoryState.objects.update_or_create(
            run_id=run_id,
            defaults={
                "rows_stored": run.rows_stored,
                "copied_at": timezone.now(),
                "seconds": time.monotonic() - began,
            },
        )
    return True


def _hold(run_id: UUID) -> bool:
    """Keep a run from being deleted until the transaction ends. Ingest goes on."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM runs_run WHERE id = %s AND deleted_at IS NULL FOR KEY SHARE", [run_id])
        return bool(cursor.rowcount)


def _read(run: Run) -> list[ScalarHistory]:
    names = sorted(run.last_scalars, key=lambda name: (name != "loss", name))[:MAX_SCALARS]
    span = queries.step_range(run.id)
    if span is None or not names:
        return []
    stride = _stride(span[0], span[1])
    buckets = queries.scalar_means(run.id, dict.fromkeys(names, stride))
    rows = []
    for name in names:
        line, means = queries.scalar(run.id, name, points=POINTS), buckets[name]
        rows.append(
            ScalarHistory(
                run_id=run.id,
                name=name,
                thinned=line.thinned,
                steps=line.steps.tolist(),
                times=_times(line.times),
                values=line.values.tolist(),
                stride=stride,
                ends=means.ends.tolist(),
                means=means.means.tolist(),
                lasts=means.last.tolist(),
                counts=means.counts.tolist(),
            )
        )
    return rows


def _stride(first: int, last: int) -> int:
    """The smallest power of two that leaves at most POINTS buckets of whole strides."""
    stride = 1
    while (last - first + 1) // stride > POINTS:
        stride *= 2
    return stride


def _times(times: NDArray[np.datetime64]) -> list[Any]:
    """Aware times in UTC; None where a client sent none."""
    whole = times.astype("datetime64[us]").tolist()
    return [None if moment is None else moment.replace(tzinfo=UTC) for moment in whole]
