"""One at a time for a run's stored data."""

from __future__ import annotations

from uuid import UUID

from django.db import connection

# The first key of the pair that PostgreSQL's advisory locks take; the second is of the run.
COMPACTION = 0x66703873


def lock_run(run_id: UUID, *, wait: bool = False) -> bool:
    """Take the right to move a run's stored data until the transaction ends. Needs a transaction.

    Compaction, retention and deletion take it. False: another has it (never when `wait`). A process that dies
    gives it back, since PostgreSQL ends its transaction.
    """
    key = run_id.int & 0x7FFFFFFF
    with connection.cursor() as cursor:
        if wait:
            cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [COMPACTION, key])
            return True
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [COMPACTION, key])
        (taken,) = cursor.fetchone()
        return bool(taken)
