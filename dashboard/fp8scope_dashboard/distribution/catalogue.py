"""Read from the catalogue of the database where its tables are, their keys, and whether Citus is there."""

from __future__ import annotations

from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

from fp8scope_dashboard.distribution.layout import Location
from fp8scope_dashboard.distribution.statements import ANCHOR, Constraint, StoredTables

# A table distributed by hash has shards. Of others, those that two-phase commit keeps equal are everywhere.
_LOCATIONS: Final = """
    SELECT class.relname, CASE partmethod WHEN 'h' THEN 'shards' ELSE 'every node' END
    FROM pg_dist_partition JOIN pg_class AS class ON class.oid = logicalrelid
    WHERE class.relnamespace = current_schema()::regnamespace AND NOT class.relispartition
        AND (partmethod = 'h' OR repmodel = 't')
"""
_CONSTRAINTS: Final = """
    SELECT class.relname, conname, contype::text, target.relname, ARRAY(
        SELECT attname::text FROM unnest(conkey) WITH ORDINALITY AS key (number, position)
        JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY position)
    FROM pg_constraint
    JOIN pg_class AS class ON class.oid = conrelid
    LEFT JOIN pg_class AS target ON target.oid = confrelid
    WHERE contype IN ('p', 'u', 'f') AND class.relnamespace = current_schema()::regnamespace
        AND NOT class.relispartition AND conparentid = 0 AND class.relkind IN ('r', 'p')
    ORDER BY 1, 2
"""
_FUNCTION: Final = """
    SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_object JOIN pg_proc ON pg_proc.oid = objid
        WHERE classid = 'pg_proc'::regclass AND proname = %s AND distribution_argument_index IS NOT NULL)
"""


def has_citus(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the extension is created in the database."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')")
        return bool(cursor.fetchone()[0])


def is_distributed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the runs of the database are in shards."""
    return has_citus(connection) and read(connection).locations.get(ANCHOR) is Location.SHARDS


def has_function(connection: BaseDatabaseWrapper, name: str) -> bool:
    """Return whether the nodes carry out a function of this name themselves."""
    with connection.cursor() as cursor:
        cursor.execute(_FUNCTION, [name])
        return bool(cursor.fetchone()[0])


def read(connection: BaseDatabaseWrapper) -> StoredTables:
    """Read the catalogue. Needs the extension."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCATIONS)
        locations = {str(table): Location(location) for table, location in cursor.fetchall()}
    return StoredTables(locations, read_constraints(connection))


def read_constraints(connection: BaseDatabaseWrapper) -> list[Constraint]:
    """The keys and foreign keys of all tables."""
    with connection.cursor() as cursor:
        cursor.execute(_CONSTRAINTS)
        return [_constraint(row) for row in cursor.fetchall()]


def _constraint(row: tuple[Any, ...]) -> Constraint:
    table, name, kind, target, columns = row
    return Constraint(table=table, name=name, kind=kind, columns=tuple(columns), target=target)
