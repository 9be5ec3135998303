"""Opens SQLite files of other tools: read-only, and only their plain tables."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.limits import MAX_RECORD
from fp8scope.importing.model import UnreadableError
from fp8scope.importing.source import SourcePath

MAGIC: Final = b"SQLite format 3\0"
ROWS_AT_ONCE: Final = 20_000


def has_tables(candidate: SourcePath, columns: dict[str, set[str]]) -> bool:
    """Return whether a file is a database with these tables and columns."""
    if not candidate.head.startswith(MAGIC):
        return False
    try:
        with open_database(candidate.path) as database:
            return all(needed <= set(database.columns(table)) for table, needed in columns.items())
    except UnreadableError:
        return False


class SqliteDatabase:
    """An open database."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        # Views, virtual tables and what their definitions compute are not read.
        listed = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchmany(
            1_000
        )
        self._tables = {
            str(name) for name, sql in listed if str(sql).lstrip().upper().startswith("CREATE TABLE")
        }

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's stored columns; none if there is no such table."""
        if table not in self._tables:
            return []
        # Columns that are computed have other values of `hidden`.
        listed = self._connection.execute("SELECT name FROM pragma_table_xinfo(?) WHERE hidden = 0", (table,))
        return [str(name) for (name,) in listed.fetchmany(1_000)]

    def rows(
        self, table: str, columns: Sequence[str], where: str = "", values: Sequence[Any] = (), order: str = ""
    ) -> Iterator[Sequence[tuple[Any, ...]]]:
        """Yield the rows of a table in blocks. The names come from code, the values from anywhere.

        Raises:
            UnreadableError: the table or a column is missing.
        """
        if missing := set(columns) - set(self.columns(table)):
            raise UnreadableError(f"the database has no {table}.{min(missing)}: which version wrote it?")
        query = f"SELECT {', '.join(columns)} FROM {table}"
        query += f" WHERE {where}" if where else ""
        query += f" ORDER BY {order}" if order else ""
        # Rows are read while the caller of the reader takes them, outside of `open_database`.
        with _as_unreadable(self._path):
            cursor = self._connection.execute(query, tuple(values))
        while True:
            with _as_unreadable(self._path):
                block = cursor.fetchmany(ROWS_AT_ONCE)
            if not block:
                return
            yield block


@contextmanager
def open_database(path: Path) -> Iterator[SqliteDatabase]:
    """Open a database, and turn SQLite's errors into UnreadableError."""
    address = f"file:{str(path.resolve()).replace('%', '%25').replace('?', '%3f').replace('#', '%23')}"
    with _as_unreadable(path):
        connection = _connect(address)
    try:
        with _as_unreadable(path):
            yield SqliteDatabase(connection, path)
    finally:
        connection.close()


@contextmanager
def _as_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeError) as error:
        raise UnreadableError(f"{path} cannot be read as SQLite: {error}") from None


def _connect(address: str) -> sqlite3.Connection:
    """Connect; to a database that was copied without its log of writes as it is in the file."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        connection = sqlite3.connect(f"{address}?{mode}", uri=True, timeout=10)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RECORD)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            connection.close()
            if mode != "mode=ro":
                raise
        else:
            return connection
    raise AssertionError("unreachable")
