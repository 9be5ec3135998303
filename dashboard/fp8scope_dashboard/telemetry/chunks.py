"""Write chunks."""

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
    """Store a validated batch unchanged, within the transaction of the caller.

    The receipt of the caller ensures that this happens once; a second time violates the primary key.
    """
    values = [run_id, writer, seq, seq, first_step, last_step, rows, points, body]
    connection.ensure_connection()
    # The cursor of psycopg sends the body as bytes, that of Django as text of twice the size.
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(
            """
            INSERT INTO telemetry_chunk
                (run_id, writer, seq, last_seq, first_step, last_step, rows, points, body, received_at)
            VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, now())
            """,
            values,
        )
