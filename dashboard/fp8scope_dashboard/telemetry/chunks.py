"""Write chunks."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from fp8scope_dashboard.db import replica, sql

# Stores a batch as a chunk. Ends before FROM, so that it can be a part of a larger statement.
INSERT: Final = """
    INSERT INTO telemetry_chunk
        (run_id, writer, seq, last_seq, first_step, last_step, rows, points, body, head,
        received_at)
    SELECT %(run)s, %(writer)s, %(seq)s, %(seq)s, %(first_step)s, %(last_step)s, %(rows)s, %(points)s,
        %(body)s, %(head)s::integer, now()
"""


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
    head: int | None = None,
) -> None:
    """Store a validated batch unchanged. A second time violates the primary key. `head`: see `Chunk`."""
    parameters = {
        "run": run_id,
        "writer": writer,
        "seq": seq,
        "first_step": first_step,
        "last_step": last_step,
        "rows": rows,
        "points": points,
        "body": body,
        "head": head,
    }
    sql.fetch(f"{INSERT} RETURNING true", parameters, replica.PRIMARY)
