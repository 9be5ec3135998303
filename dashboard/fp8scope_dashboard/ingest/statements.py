"""SQL that ingest runs for every batch, in as few round trips as possible."""

from __future__ import annotations

import json
from typing import Final, NamedTuple
from uuid import UUID

from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.ingest.batch import Batch, to_json_number
from fp8scope_dashboard.receipts import dedup


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


# One call is one round trip, one transaction, and one statement for the node that has the run; see the
# migration that makes the function.
_STORE: Final = """
    SELECT fp8scope_store_batch(%(run)s, %(writer)s, %(writer_id)s, %(seq)s, %(kind)s, %(digest)s,
        %(first_step)s, %(last_step)s, %(rows)s, %(points)s, %(body)s, %(head)s::integer,
        %(scalars)s::jsonb, %(statistics)s::text[])
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
    ((is_new,),) = sql.fetch(_STORE, parameters, replica.PRIMARY)
    return bool(is_new)
