"""Move bodies of old runs into the cold store: write a file, read it back, then change the rows.

A worker may be killed at any moment. Until the transaction of the rows is committed, PostgreSQL has all
bodies, and what is in the store is at most a file that a sweep deletes (see files.py). The lock of the run is
not held while a file is written, so compaction and deletion do not wait. A row that has changed meanwhile
keeps its body.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import IO, Any, Final
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from fp8scope_dashboard.cold_store.locations import BodyLocation, file_name
from fp8scope_dashboard.cold_store.object_store import configured, object_store
from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.cold.files import claim_file, is_claimed, settle_file
from fp8scope_dashboard.telemetry.cold.tables import TABLES, ColdTable
from fp8scope_dashboard.telemetry.locks import lock_run
from fp8scope_dashboard.telemetry.models import Chunk, Rolling

# The size of a file, which is exceeded by less than one body.
MAX_FILE_BYTES: Final = 64 << 20
# Seconds until the last file of one job begins, so that other runs get their turn.
SECONDS_AT_ONCE: Final = 60.0
# Runs of which one sweep starts a job, those that are silent for longest first.
MAX_RUNS: Final = 100


@dataclass(frozen=True)
class Moved:
    """The number of bodies that a job has moved, and whether the run has no others."""

    bodies: int
    is_all: bool


@dataclass
class _Content:
    """A file that is being made, and the rows whose bodies it has, by table: their keys, and digest, offset,
    size of the body.
    """

    file: IO[bytes]
    size: int = 0
    digest: Any = field(default_factory=sha256)
    rows: dict[str, list[tuple[tuple[Any, ...], bytes, int, int]]] = field(default_factory=dict)

    def add(self, table: ColdTable, keys: tuple[Any, ...], body: bytes) -> None:
        self.file.write(body)
        self.digest.update(body)
        self.rows.setdefault(table.name, []).append((keys, sha256(body).digest(), self.size, len(body)))
        self.size += len(body)

    @property
    def count(self) -> int:
        return sum(map(len, self.rows.values()))


def runs_due() -> list[UUID]:
    """Runs that have been silent for long enough, are compacted, and have bodies to move."""
    before = timezone.now() - configured().after
    due = Rolling.objects.filter(pending=False, cold_due=True, run__heartbeat_at__lt=before)
    due = due.filter(run__deleted_at=None).order_by("run__heartbeat_at")
    return list(due.values_list("run_id", flat=True)[:MAX_RUNS])


def move_run(run_id: UUID, seconds: float = SECONDS_AT_ONCE) -> Moved:
    """Move the bodies of a run, beginning no file after so many seconds.

    Safe to run at any time, repeatedly, and by several workers concurrently.

    Raises:
        ColdStoreError: the store does not answer, or has not stored a file; nothing is lost.
    """
    deadline, total = time.monotonic() + seconds, 0
    while moved := _move_file(run_id):
        total += moved
        if time.monotonic() > deadline:
            return Moved(total, is_all=False)
    return Moved(total, is_all=_settle(run_id))


def _move_file(run_id: UUID) -> int:
    """Move bodies into one file. Returns their number."""
    folder = configured().folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        content = _read(run_id, file)
        if not content.count:
            return 0
        digest = content.digest.digest()
        claimed = claim_file(run_id, digest, content.size, content.count)
        if claimed is None:
            return 0
        object_store().put(file_name(run_id, digest), file, content.size, digest)
    with transaction.atomic():
        lock_run(run_id, wait=True)
        if not is_claimed(claimed):
            return 0
        moved = sum(
            _refer(run_id, table, content.rows[table.name], digest)
            for table in TABLES
            if table.name in content.rows
        )
        settle_file(claimed, moved)
    return moved


def _read(run_id: UUID, file: IO[bytes]) -> _Content:
    """Write the next bodies into a local file, neighbours beside each other."""
    content = _Content(file)
    for table in TABLES:
        if content.size >= MAX_FILE_BYTES:
            break
        rows = sql.stream(
            f"""
            SELECT {table.key_names}, body FROM (
                SELECT {table.key_names}, body, sum(octet_length(body)) OVER (ORDER BY {table.key_names})
                    - octet_length(body) AS before
                FROM {table.name}
                WHERE run_id = %(run)s AND location IS NULL AND {table.where}
            ) AS next WHERE before < %(most)s ORDER BY {table.key_names}
            """,
            {"run": run_id, "most": MAX_FILE_BYTES - content.size},
        )
        for *keys, body in rows:
            content.add(table, tuple(keys), bytes(body))
    return content


def _refer(
    run_id: UUID, table: ColdTable, rows: Sequence[tuple[tuple[Any, ...], bytes, int, int]], file: bytes
) -> int:
    """Replace the bodies of rows by their locations, where they are what is in the file. Returns how many."""
    locations = [BodyLocation(file, offset, size, digest) for _, digest, offset, size in rows]
    columns = zip(*(keys for keys, *_ in rows), strict=True)
    parameters = {name: list(column) for (name, _), column in zip(table.keys, columns, strict=True)}
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            UPDATE {table.name} AS stored SET body = '', location = moved.location
            FROM unnest({table.key_arrays}, %(digests)s::bytea[], %(locations)s::bytea[])
                AS moved ({table.key_names}, digest, location)
            WHERE stored.run_id = %(run)s AND {table.same_key("moved")} AND stored.location IS NULL
                AND sha256(stored.body) = moved.digest
            """,
            {
                **parameters,
                "run": run_id,
                "digests": [location.digest for location in locations],
                "locations": [location.pack() for location in locations],
            },
        )
        return int(cursor.rowcount)


@transaction.atomic
def _settle(run_id: UUID) -> bool:
    """Note that a run has nothing to move. Returns False if it has, for example since a moment ago."""
    lock_run(run_id, wait=True)
    warm = "run_id = %(run)s AND location IS NULL"
    left = any(
        sql.fetch(
            f"SELECT 1 FROM {table.name} WHERE {warm} AND {table.where} LIMIT 1",
            {"run": run_id},
        )
        for table in TABLES
    )
    if left or Chunk.objects.filter(run_id=run_id).exists():
        return False
    Rolling.objects.filter(run_id=run_id).update(cold_due=False)
    return True
