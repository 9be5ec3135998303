"""Bring bodies back from the cold store into PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from fp8scope_dashboard.cold_store.locations import BodyLocation
from fp8scope_dashboard.cold_store.reading import read_bodies
from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.telemetry.cold.bodies import MAX_BYTES
from fp8scope_dashboard.telemetry.cold.files import release_files
from fp8scope_dashboard.telemetry.cold.tables import TABLES, ColdTable
from fp8scope_dashboard.telemetry.locks import lock_run
from fp8scope_dashboard.telemetry.models import ColdFile, ColdFileState, Rolling


def runs_in_store() -> list[UUID]:
    """The runs that have files in the cold store."""
    stored = ColdFile.objects.filter(state=ColdFileState.STORED).order_by("run_id")
    return list(stored.values_list("run_id", flat=True).distinct())


def bring_back(run_id: UUID) -> int:
    """Bring all bodies of a run back, in transactions of bounded size. Returns their number.

    The run stays in PostgreSQL until it gets new rows. May be killed and repeated.

    Raises:
        ColdStoreError: a body cannot be read; those before it are back.
    """
    # First, so that no sweep moves it again meanwhile.
    Rolling.objects.filter(run_id=run_id).update(cold_due=False)
    count = 0
    for table in TABLES:
        for rows in cold_rows(run_id, table):
            count += _bring_back(run_id, table, rows)
    with transaction.atomic():
        lock_run(run_id, wait=True)
        release_files(run_id)
    return count


def cold_rows(run_id: UUID, table: ColdTable) -> Iterator[list[tuple[tuple[Any, ...], BodyLocation]]]:
    """Rows with a body in the cold store: their keys and locations, some megabytes at a time."""
    stored = sql.fetch(
        f"""
        SELECT {table.key_names}, location FROM {table.name}
        WHERE run_id = %(run)s AND location IS NOT NULL ORDER BY location
        """,
        {"run": run_id},
        replica.PRIMARY,
    )
    rows: list[tuple[tuple[Any, ...], BodyLocation]] = []
    size = 0
    for *keys, location in stored:
        rows.append((tuple(keys), BodyLocation.unpack(location)))
        size += rows[-1][1].size
        if size >= MAX_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _bring_back(run_id: UUID, table: ColdTable, rows: list[tuple[tuple[Any, ...], BodyLocation]]) -> int:
    bodies = read_bodies(run_id, [location for _, location in rows], cached=False)
    same_key = " AND ".join(f"{name} = %s" for name, _ in table.keys)
    with transaction.atomic():
        lock_run(run_id, wait=True)
        with connection.cursor() as cursor:
            # Retention may have deleted rows meanwhile.
            cursor.executemany(
                f"""
                UPDATE {table.name} SET body = %s, location = NULL
                WHERE run_id = %s AND {same_key} AND location = %s
                """,
                [
                    (bytes(body), run_id, *keys, location.pack())
                    for body, (keys, location) in zip(bodies, rows, strict=True)
                ],
            )
            return int(cursor.rowcount)
