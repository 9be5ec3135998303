"""Statements with bytes in them. psycopg's own cursor binds on the server, so that bytes travel as bytes.

Django's would write them as text, of twice their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from django.db import connection, connections

from fp8scope_dashboard.db.replica import database


def stream(statement: str, parameters: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """A query's rows as PostgreSQL finds them; never all of them in memory.

    The connection answers nothing else until the last row has been taken.
    """
    reading = connections[database()]
    reading.ensure_connection()
    with reading.wrap_database_errors, psycopg.Cursor(reading.connection) as cursor:
        yield from cursor.stream(statement, parameters, binary=True)


def fetch(statement: str, parameters: dict[str, Any], using: str | None = None) -> list[tuple[Any, ...]]:
    """All of a query's rows, from the database `using` where that must not be a replica."""
    reading = connections[using or database()]
    reading.ensure_connection()
    with reading.wrap_database_errors, psycopg.Cursor(reading.connection) as cursor:
        return cursor.execute(statement, parameters, binary=True).fetchall()


def write(statement: str, rows: Iterable[Sequence[Any]]) -> None:
    """The same statement for each of the rows, without waiting for the answers in between."""
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.executemany(statement, rows)
