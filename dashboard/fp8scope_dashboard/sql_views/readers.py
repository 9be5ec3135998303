"""Logins of PostgreSQL that read the views only: of all projects or of one, within a time.

The privileges are the limit: a login may read the views, and no table. Its settings (read-only transactions,
the longest statement) can be changed by whoever uses it, so `enforce_limits` ends what takes longer.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

from django.db import ProgrammingError, connection, transaction
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.sql_views.installation import grant, install_views
from fp8scope_dashboard.sql_views.models import SqlReader
from fp8scope_dashboard.sql_views.view import SCHEMA

NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
MIN_SECONDS, MAX_SECONDS, DEFAULT_SECONDS = 1, 3600, 30
MIN_PASSWORD, MAX_PASSWORD = 12, 1024
MAX_CONNECTIONS: Final = 10
IDLE_SECONDS: Final = 60
LOCK_SECONDS: Final = 5
# Sessions that go on for longer than their limit by this factor are ended.
PATIENCE: Final = 2


class ReaderError(Exception):
    """The login cannot be made or removed; the message says what to do."""


def make_reader(
    role: str, project: Project | None, *, seconds: int = DEFAULT_SECONDS, password: str = ""
) -> str:
    """Make a login, or give an existing one a new password, project and limit. Returns its password.

    Args:
        project: None: it reads all projects.
        seconds: the longest statement.
        password: by default a random one.

    Raises:
        ReaderError: for a name that it cannot have, or if the server's own user may not create logins.
    """
    _check(role, seconds, password)
    password = password or secrets.token_urlsafe(24)
    install_views(connection)
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            is_new = not SqlReader.objects.filter(role=role).exists()
            exists = _exists(cursor, role)
            if is_new and exists:
                raise ReaderError(f"PostgreSQL has a role {role!r} already: choose another name")
            if not exists:
                cursor.execute(_named("CREATE ROLE {name} NOLOGIN", role))
                # So that the server may end its sessions.
                cursor.execute(_named("GRANT {name} TO CURRENT_USER", role))
            SqlReader.objects.update_or_create(role=role, defaults={"project": project, "seconds": seconds})
            _set(cursor, role, seconds)
            grant(cursor, role)
            cursor.execute(
                _named(
                    "ALTER ROLE {name} LOGIN CONNECTION LIMIT {limit} PASSWORD {verifier}",
                    role,
                    limit=sql.Literal(MAX_CONNECTIONS),
                    verifier=sql.Literal(_verifier(role, password)),
                )
            )
    except ProgrammingError as error:
        raise _explained(error) from error
    return password


def remove_reader(role: str) -> None:
    """Remove a login; its sessions end.

    Raises:
        ReaderError: there is no such login.
    """
    reader = SqlReader.objects.filter(role=role).first()
    if reader is None:
        raise ReaderError(f"there is no login {role!r}; `fp8scope admin sql-readers` lists them")
    try:
        with connection.cursor() as cursor:
            if _exists(cursor, role):
                cursor.execute(_named("ALTER ROLE {name} NOLOGIN", role))
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [role]
                )
                with transaction.atomic():
                    cursor.execute(_named("DROP OWNED BY {name}", role))
                    cursor.execute(_named("DROP ROLE {name}", role))
                    reader.delete()
            else:
                reader.delete()
    except ProgrammingError as error:
        raise _explained(error) from error


def enforce_limits() -> int:
    """End what logins run for longer than they may, or hold locks with. Returns the number of sessions.

    A login can change its own settings, but not escape this. Advisory locks would hold up migrations.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
            JOIN sql_views_sqlreader AS reader ON reader.role = usename
            WHERE pg_has_role(usesysid, 'USAGE') AND datname = current_database() AND (
                state LIKE 'idle in transaction%%'
                    AND state_change < clock_timestamp() - make_interval(secs => %(patience)s * %(idle)s)
                OR state = 'active'
                    AND query_start < clock_timestamp() - make_interval(secs => %(patience)s * reader.seconds)
                OR EXISTS (
                    SELECT FROM pg_locks AS held WHERE held.pid = pg_stat_activity.pid
                        AND held.locktype = 'advisory' AND held.granted
                )
            )
            """,
            {"patience": PATIENCE, "idle": IDLE_SECONDS},
        )
        return int(cursor.fetchone()[0])


def _check(role: str, seconds: int, password: str) -> None:
    if not NAME.fullmatch(role) or role.startswith("pg_"):
        raise ReaderError(
            f"{role[:70]!r} cannot be a login: use at most 63 lower-case letters, digits and _, beginning "
            "with a letter, and not with pg_"
        )
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ReaderError(f"the longest statement is {MIN_SECONDS} to {MAX_SECONDS} seconds, not {seconds}")
    if password and not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise ReaderError(f"the password needs {MIN_PASSWORD} to {MAX_PASSWORD} characters")


def _set(cursor: Any, role: str, seconds: int) -> None:
    """The settings of the login's sessions, times in milliseconds."""
    settings = {
        "default_transaction_read_only": "on",
        "statement_timeout": str(1000 * seconds),
        "idle_in_transaction_session_timeout": str(1000 * IDLE_SECONDS),
        "lock_timeout": str(1000 * LOCK_SECONDS),
        "search_path": SCHEMA,
    }
    for setting, value in settings.items():
        cursor.execute(
            _named(
                "ALTER ROLE {name} SET {setting} = {value}",
                role,
                setting=sql.Identifier(setting),
                value=sql.Literal(value),
            )
        )
    database = connection.settings_dict["NAME"]
    cursor.execute(
        _named("GRANT CONNECT ON DATABASE {database} TO {name}", role, database=sql.Identifier(database))
    )


def _verifier(role: str, password: str) -> str:
    """The password as PostgreSQL stores it, so that the statement, which may be logged, does not have it."""
    connection.ensure_connection()
    encrypted: bytes = connection.connection.pgconn.encrypt_password(
        password.encode(), role.encode(), b"scram-sha-256"
    )
    return encrypted.decode("ascii")


def _exists(cursor: Any, role: str) -> bool:
    cursor.execute("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = %s)", [role])
    return bool(cursor.fetchone()[0])


def _named(statement: str, role: str, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(statement).format(name=sql.Identifier(role), **parts)


def _explained(error: ProgrammingError) -> Exception:
    if not isinstance(error.__cause__, InsufficientPrivilege):
        return error
    user = connection.settings_dict["USER"]
    return ReaderError(
        "the server's user of PostgreSQL may not make logins. Let an administrator of the database run once: "
        f'ALTER ROLE "{user}" CREATEROLE'
    )
