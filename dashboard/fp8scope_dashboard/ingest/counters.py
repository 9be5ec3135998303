"""The statements of every batch, in as few trips to PostgreSQL as can be."""

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
    """What storing a batch needs of its writer."""

    id: int
    rows_dropped: int
    catalogued: int


@contextmanager
def together() -> Iterator[None]:
    """Send the statements inside without waiting for each; errors come at the end at the latest.

    libpq's pipeline mode: asking for a statement's rows fetches the answers of all before it.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors, connection.connection.pipeline():
        yield


def ask_for_writer(run: Run, uuid: UUID) -> psycopg.Cursor[KnownWriter]:
    """A cursor on the writer, empty where it is new. The catalogue stays where it is: it may be long."""
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
    """Add a batch to the counters, as expressions of the stored ones: concurrent batches all count.

    A batch that comes late adds scalars that are missing, but no older value for those that are there. Silent
    becomes running, every other state stays. The writer comes before the run, as everywhere.
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
    # LEAST and GREATEST pass over NULL.
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
                SELECT name FROM unnest(%(statistics)s::text[]) WITH ORDINALITY AS sent (name, place)
                WHERE name <> ALL (statistics) ORDER BY place)
        WHERE id = %(run)s
        """,
        values,
    )


def _connection() -> psycopg.Connection[tuple[object, ...]]:
    connection.ensure_connection()
    found: psycopg.Connection[tuple[object, ...]] = connection.connection
    return found
