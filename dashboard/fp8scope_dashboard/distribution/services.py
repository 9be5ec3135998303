"""Distribute the tables of the installation's database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import sql

from fp8scope_dashboard.distribution import catalogue
from fp8scope_dashboard.distribution.errors import DistributionError
from fp8scope_dashboard.distribution.statements import statements

DEFAULT_SHARDS: Final = 32
MAX_SHARDS: Final = 1_024
# A transaction that reads all shards and then writes a table that is on every node, as ours may, needs
# to have one connection to each node: with several, Citus refuses the write. Nodes still work in parallel.
SETTINGS: Final = {"citus.multi_shard_modify_mode": "sequential"}
# The node of a run carries out the function itself.
FUNCTION: Final = "fp8scope_store_batch"
_DELEGATE: Final = """
    SELECT create_distributed_function(oid::regprocedure, 'of_run', colocate_with := 'runs_run')
    FROM pg_proc WHERE proname = '{}'
"""
_AVAILABLE: Final = """
    SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'citus'),
        'citus' = ANY(string_to_array(replace(current_setting('shared_preload_libraries'), ' ', ''), ','))
"""


def check_available() -> None:
    """Check that the server has Citus.

    Raises:
        DistributionError: it is not installed, or not loaded at the server's start.
    """
    with connection.cursor() as cursor:
        cursor.execute(_AVAILABLE)
        is_installed, is_loaded = cursor.fetchone()
    if not is_installed:
        raise DistributionError(
            "this PostgreSQL has no extension Citus: install it on the coordinator and on all nodes, see "
            "docs/distributed_store.md"
        )
    if not is_loaded:
        raise DistributionError(
            "Citus is installed but not loaded: set shared_preload_libraries = 'citus' in postgresql.conf, "
            "and restart PostgreSQL"
        )


def create_extension() -> None:
    """Create the extension in the database, and set for the database what the statements of fp8scope need."""
    check_available()
    with connection.cursor() as cursor:
        if not catalogue.has_citus(connection):
            cursor.execute("CREATE EXTENSION citus")
        cursor.execute("SELECT current_database()")
        (database,) = cursor.fetchone()
        for name, value in SETTINGS.items():
            setting = sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                sql.Identifier(database), sql.SQL(name), sql.Literal(value)
            )
            cursor.execute(setting)


def distribute(
    using: BaseDatabaseWrapper = connection,
    *,
    shards: int = DEFAULT_SHARDS,
    note: Callable[[str], Any] = lambda _: None,
) -> int:
    """Bring every table to its location. Returns the number of statements; 0 if all were there.

    Each statement is a transaction. One that fails leaves a database that works as before, or that the next
    call completes. Writes to a table wait while it moves.
    """
    wanted = statements(catalogue.read(using), shards)
    if not catalogue.has_function(using, FUNCTION):
        wanted.append(_DELEGATE.format(FUNCTION))
    with using.cursor() as cursor:
        for name, value in SETTINGS.items():
            cursor.execute(f"SET {name} = '{value}'")
        for statement in wanted:
            note(statement)
            cursor.execute(statement)
    return len(wanted)
