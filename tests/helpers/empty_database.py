"""Empties the test database after a test whose transactions were committed.

Django's flush truncates every table and then creates all permissions again. That takes longer than most of
these tests, so only tables with data are emptied here, and permissions stay.
"""

from __future__ import annotations

import os
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from helpers.distributed_database import NODES
from psycopg.errors import DeadlockDetected

KEPT = frozenset({"auth_permission", "django_content_type"})
"""Filled by migrate; no test changes them."""
SMALL_BYTES = 64 << 10
"""Up to this size deleting the rows is faster than truncating. Larger tables are truncated: no test is to
measure or read what earlier ones left dead in a table."""
SIZES = """
SELECT name, greatest(pg_table_size(name::regclass), (
    SELECT sum(pg_table_size(relid)) FROM pg_partition_tree(name::regclass)
))::bigint
FROM unnest(%s::text[]) AS name
"""
"""The bytes of each table, also of one in partitions."""


ATTEMPTS = 10
"""A worker that still ends its job may lock tables in another order; PostgreSQL then ends one of the two."""


def empty(connection: BaseDatabaseWrapper) -> None:
    """Remove all rows of Django's models. Waits, as a flush does, for other transactions to end."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _empty(connection)
            return
        except OperationalError as error:
            if not isinstance(error.__cause__, DeadlockDetected) or attempt == ATTEMPTS:
                raise


def _empty(connection: BaseDatabaseWrapper) -> None:
    names = set(connection.introspection.django_table_names(only_existing=True)) - KEPT
    tables = [connection.ops.quote_name(name) for name in sorted(names)]
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {', '.join(tables)}")
        cursor.execute(SIZES, [tables])
        sizes: dict[str, int] = dict(cursor.fetchall())
        if NODES in os.environ:
            # What is here of a distributed table is empty; its rows are in shards.
            cursor.execute(
                "SELECT relname FROM pg_dist_partition JOIN pg_class ON pg_class.oid = logicalrelid"
            )
            distributed = {connection.ops.quote_name(name) for (name,) in cursor.fetchall()}
            sizes |= dict.fromkeys(sizes.keys() & distributed, 1)
        if large := [table for table, size in sizes.items() if size > SMALL_BYTES]:
            cursor.execute(f"TRUNCATE {', '.join(large)} CASCADE")
        if small := [f"DELETE FROM {table}" for table, size in sizes.items() if 0 < size <= SMALL_BYTES]:
            cursor.execute("; ".join(small))


def empty_databases(test_case: Any) -> None:
    """Replaces `TransactionTestCase._fixture_teardown`."""
    for alias in test_case._databases_names(include_mirrors=False):
        empty(connections[alias])
