"""A lock on the stored data of a run."""

from __future__ import annotations

from uuid import UUID

from django.db import connection

# The first key of the advisory lock; the second derives from the id of the run.
STORED_DATA = 0x66703873


def lock_run(run_id: UUID, *, wait: bool = False) -> bool:
    """Lock the stored data of a run until the transaction ends. Requires a transaction.

    Compaction, retention and deletion take this lock. Returns False if another process holds it; with `wait`,
    waits instead. PostgreSQL releases the lock of a process that dies.
    """
    key = run_id.int & 0x7FFFFFFF
    with connection.cursor() as cursor:
        if wait:
            cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [STORED_DATA, key])
            return True
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [STORED_DATA, key])
        (taken,) = cursor.fetchone()
        return bool(taken)
