"""Run SQL with binary parameters and results.

The cursor of psycopg binds parameters on the server and transfers bytes as they are. The cursor of Django
would send them as text of twice their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from django.db import connection, connections

from fp8scope_dashboard.db.replica import database


def stream(statement: str, parameters: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Iterate over the rows of a query without loading all of them.

    The connection cannot be used otherwise until the last row is read.
    """
    reading = connections[database()]
    reading.ensure_connection()
    with reading.wrap_database_errors, psycopg.Cursor(reading.connection) as cursor:
        yield from cursor.stream(statement, parameters, binary=True)


def fetch(statement: str, parameters: dict[str, Any], using: str | None = None) -> list[tuple[Any, ...]]:
    """Return the rows of a query, from the database `using` or else the one for reads."""
    reading = connections[using or database()]
    reading.ensure_connection()
    with reading.wrap_database_errors, psycopg.Cursor(reading.connection) as cursor:
        return cursor.execute(statement, parameters, binary=True).fetchall()


def fetch_each(
    statement: str, parameters: Sequence[dict[str, Any]], using: str | None = None
) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a query for each set of parameters, in about one round trip for all.

    Each is a statement of its own, so that in a distributed store each goes to the node of its run.
    """
    if not parameters:
        return []
    reading = connections[using or database()]
    reading.ensure_connection()
    with reading.wrap_database_errors, psycopg.Cursor(reading.connection) as cursor:
        cursor.format = psycopg.pq.Format.BINARY
        cursor.executemany(statement, parameters, returning=True)
        rows = [cursor.fetchall()]
        while cursor.nextset():
            rows.append(cursor.fetchall())
        return rows


def write(statement: str, rows: Iterable[Sequence[Any]]) -> None:
    """Run a statement for each row of parameters, without waiting for each result."""
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.executemany(statement, rows)
