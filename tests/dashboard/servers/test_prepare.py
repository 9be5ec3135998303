"""Preparing an installation while others do, on other machines and behind a pooler."""

from __future__ import annotations

from django.db import connection

from fp8scope_dashboard.servers.prepare import MIGRATION_LOCK, migration_lock

HOLDERS = """
    SELECT state FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND objid = %s AND pg_locks.database =
        (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def holders() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(HOLDERS, [MIGRATION_LOCK])
        return [state for (state,) in cursor.fetchall()]


def test_it_works(db: None) -> None:
    """A transaction holds the lock, so that a pooler leaves its connection to it."""
    with migration_lock():
        assert holders() == ["idle in transaction"]
    assert holders() == []
