"""Writing chunks."""

from __future__ import annotations

from uuid import UUID

import psycopg
from django.db import connection


def append(
    run_id: UUID,
    writer: UUID,
    seq: int,
    body: bytes,
    *,
    first_step: int,
    last_step: int,
    rows: int,
    points: int,
) -> None:
    """Store a validated batch as it came, within the caller's transaction.

    The caller's receipt makes it happen once; the primary key would refuse a second time.
    """
    values = [run_id, writer, seq, seq, first_step, last_step, rows, points, body]
    connection.ensure_connection()
    # psycopg's own cursor binds on the server: the body travels as bytes, not as text of twice its size.
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(
            """
            INSERT INTO telemetry_chunk
                (run_id, writer, seq, last_seq, first_step, last_step, rows, points, body, received_at)
            VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, now())
            """,
            values,
        )
