"""SQL that ingest runs for every batch, in as few round trips as possible."""

from __future__ import annotations

import json
from typing import Final, NamedTuple
from uuid import UUID

from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.ingest.batch import Batch, to_json_number
from fp8scope_dashboard.receipts import dedup
from fp8scope_dashboard.telemetry import chunks


class KnownWriter(NamedTuple):
    """The fields of a writer that storing a batch needs."""

    id: int
    rows_dropped: int
    catalogued: int


def known_writer(run_id: UUID, uuid: UUID) -> KnownWriter | None:
    """The writer of a run with this id; None if it is new. Leaves out the catalogue, which may be long."""
    rows = sql.fetch(
        """
        SELECT id, rows_dropped, coalesce(cardinality(catalogue), 0)
        FROM runs_writer WHERE run_id = %(run)s AND uuid = %(uuid)s
        """,
        {"run": run_id, "uuid": uuid},
        replica.PRIMARY,
    )
    return KnownWriter(*rows[0]) if rows else None


# One statement is one round trip and, outside of a transaction, one transaction. Each part reads the one
# before it, so that locks are taken in the order of all code: receipt, writer, run. Parts that read none
# would run in the opposite order. LEAST and GREATEST ignore NULL.
_STORE: Final = f"""
    WITH receipt AS ({dedup.INSERT} RETURNING true AS is_new),
    chunk AS ({chunks.INSERT} FROM receipt RETURNING true AS is_new),
    sender AS (
        UPDATE runs_writer SET
            seen_at = clock_timestamp(),
            first_step = least(first_step, %(first_step)s),
            last_step = greatest(last_step, %(last_step)s)
        FROM chunk WHERE id = %(writer_id)s RETURNING chunk.is_new
    ), run AS (
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
        FROM sender WHERE id = %(run)s
    )
    SELECT is_new FROM receipt
"""


def store(run_id: UUID, writer_id: int, message: dedup.MessageId, batch: Batch) -> bool:
    """Store a batch with its receipt, and add it to the counters of its writer and run.

    Returns False, and changes nothing, if there is a receipt already.

    The counters are updated in SQL, so that concurrent batches all count. A late batch adds missing scalars
    but never replaces a newer value. A silent run becomes running again.
    """
    scalars = {name: to_json_number(value) for name, value in batch.last_scalars.items()}
    parameters = {
        "run": run_id,
        "writer": batch.writer,
        "seq": batch.seq,
        "kind": message.kind,
        "digest": message.digest,
        "writer_id": writer_id,
        "first_step": batch.first_step,
        "last_step": batch.last_step,
        "rows": batch.rows,
        "points": batch.points,
        "body": batch.body,
        "head": batch.head,
        "scalars": json.dumps(scalars),
        "statistics": list(batch.statistics),
    }
    return bool(sql.fetch(_STORE, parameters, replica.PRIMARY))
