"""SQL that ingest runs for every batch, in as few round trips as possible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from uuid import UUID

import psycopg
from django.db import connection
from psycopg.rows import class_row

from fp8scope_dashboard.ingest.batch import Batch, to_json_number
from fp8scope_dashboard.runs.models import Run


class KnownWriter(NamedTuple):
    """The fields of a writer that storing a batch needs."""

    id: int
    rows_dropped: int
    catalogued: int


@contextmanager
def together() -> Iterator[None]:
    """Send statements without waiting for each result (libpq pipeline mode).

    Fetching the rows of a statement waits for all statements before it. Errors are raised there, or on exit.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors, connection.connection.pipeline():
        yield


def ask_for_writer(run: Run, uuid: UUID) -> psycopg.Cursor[KnownWriter]:
    """Query a writer; the cursor is empty if it is new. Leaves out the catalogue, which may be long."""
    cursor = psycopg.Cursor(_connection(), row_factory=class_row(KnownWriter))
    cursor.execute(
        """
        SELECT id, rows_dropped, coalesce(cardinality(catalogue), 0) AS catalogued
        FROM runs_writer WHERE run_id = %s AND uuid = %s
        """,
        [run.pk, uuid],
    )
    return cursor


def count_rows(run: Run, writer_id: int, batch: Batch) -> None:
    """Add a batch to the counters of its writer and run.

    The counters are updated in SQL, so that concurrent batches all count. A late batch adds missing scalars
    but never replaces a newer value. A silent run becomes running again. Locks the writer before the run, as
    all code does.
    """
    scalars = {name: to_json_number(value) for name, value in batch.last_scalars.items()}
    values = {
        "writer": writer_id,
        "run": run.pk,
        "rows": batch.rows,
        "points": batch.points,
        "first_step": batch.first_step,
        "last_step": batch.last_step,
        "scalars": json.dumps(scalars),
        "statistics": list(batch.statistics),
    }
    cursor = psycopg.Cursor(_connection())
    # LEAST and GREATEST ignore NULL.
    cursor.execute(
        """
        UPDATE runs_writer SET
            seen_at = clock_timestamp(),
            first_step = least(first_step, %(first_step)s),
            last_step = greatest(last_step, %(last_step)s)
        WHERE id = %(writer)s
        """,
        values,
    )
    cursor.execute(
        """
        UPDATE runs_run SET
            heartbeat_at = clock_timestamp(),
            state = CASE state WHEN 'silent' THEN 'running' ELSE state END,
            rows_stored = rows_stored + %(rows)s,
            points_stored = points_stored + %(points)s,
            last_step = greatest(last_step, %(last_step)s),
            last_scalars = CASE WHEN last_step > %(last_step)s THEN %(scalars)s::jsonb || last_scalars
                ELSE last_scalars || %(scalars)s::jsonb END,
            statistics = statistics || ARRAY(
                SELECT name FROM unnest(%(statistics)s::text[]) WITH ORDINALITY AS sent (name, position)
                WHERE name <> ALL (statistics) ORDER BY position)
        WHERE id = %(run)s
        """,
        values,
    )


def _connection() -> psycopg.Connection[tuple[object, ...]]:
    connection.ensure_connection()
    raw: psycopg.Connection[tuple[object, ...]] = connection.connection
    return raw
