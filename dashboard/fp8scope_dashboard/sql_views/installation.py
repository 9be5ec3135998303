"""Make the views and remove them. The comment of the schema says which definitions are installed."""

from __future__ import annotations

from typing import Any, Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import sql

from fp8scope_dashboard.sql_views.definitions import VIEWS, digest
from fp8scope_dashboard.sql_views.view import SCHEMA

# A query of a login may hold a view until its own limit.
LOCK_TIMEOUT: Final = "60s"
MARK: Final = "Read-only views of fp8scope, see docs/grafana.md. Definitions: "
TABLE: Final = "sql_views_sqlreader"


def install_views(connection: BaseDatabaseWrapper) -> bool:
    """Make the schema and its views, unless those of this version are there; logins may read them.

    Returns whether anything was made. Nothing happens while the migrations of an older version are installed.
    """
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        if not _exists(cursor, TABLE) or _is_current(cursor):
            return False
        _drop_views(cursor)
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        for view in VIEWS:
            cursor.execute(view.statement)
            _comment(cursor, f"VIEW {SCHEMA}.{view.name}", view.meaning)
            for column in view.columns:
                _comment(cursor, f'COLUMN {SCHEMA}.{view.name}."{column.name}"', column.meaning)
        _comment(cursor, f"SCHEMA {SCHEMA}", MARK + digest())
        cursor.execute(f"SELECT role FROM {TABLE} JOIN pg_roles ON rolname = role")
        for (role,) in cursor.fetchall():
            grant(cursor, role)
        return True


def remove_views(connection: BaseDatabaseWrapper) -> None:
    """Drop the views, so that migrations may change every table; ends what logins are running."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        if _exists(cursor, TABLE):
            end_sessions(cursor)
        _drop_views(cursor)


def end_sessions(cursor: Any) -> None:
    """End all sessions of the logins."""
    cursor.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity JOIN {TABLE} ON role = usename"
        " WHERE pg_has_role(usesysid, 'USAGE') AND datname = current_database()"
    )


def grant(cursor: Any, role: str) -> None:
    """Let a role read the views, and nothing else of the database."""
    name = sql.Identifier(role)
    schema = sql.Identifier(SCHEMA)
    cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schema, name))
    for view in VIEWS:
        relation = sql.Identifier(SCHEMA, view.name)
        cursor.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(relation, name))


def _exists(cursor: Any, relation: str) -> bool:
    cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [relation])
    return bool(cursor.fetchone()[0])


def _is_current(cursor: Any) -> bool:
    """Return whether all views of this version are there: dropping a column drops the views that have it."""
    cursor.execute(
        "SELECT coalesce(obj_description(to_regnamespace(%s), 'pg_namespace'), ''),"
        " (SELECT count(*) FROM pg_views WHERE schemaname = %s AND viewname = ANY(%s))",
        [SCHEMA, SCHEMA, [view.name for view in VIEWS]],
    )
    comment, count = cursor.fetchone()
    return bool(comment == MARK + digest() and count == len(VIEWS))


def _drop_views(cursor: Any) -> None:
    cursor.execute("SELECT viewname FROM pg_views WHERE schemaname = %s", [SCHEMA])
    names = {name for (name,) in cursor.fetchall()}
    if names:
        cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    for name in sorted(names):
        # CASCADE: the views need each other. A view that somebody has added to the schema stays, unless it
        # needs one of these.
        if name in {view.name for view in VIEWS}:
            cursor.execute(f"DROP VIEW IF EXISTS {SCHEMA}.{name} CASCADE")


def _comment(cursor: Any, target: str, text: str) -> None:
    cursor.execute(
        sql.SQL("COMMENT ON {target} IS {text}").format(target=sql.SQL(target), text=sql.Literal(text))
    )
