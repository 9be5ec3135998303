"""Bodies for readers of the store, which need not know where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from uuid import UUID

from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.cold_store.locations import BodyLocation
from fp8scope_dashboard.cold_store.reading import read_bodies
from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.models import ColdFile, Histogram

# Bodies that are read at once, and in memory at a time.
MAX_BYTES: Final = 64 << 20
_LAST_STEP: Final = """
    SELECT max(last_step) FROM telemetry_block block WHERE run_id = %(run)s AND EXISTS (
        SELECT FROM telemetry_tile tile
        WHERE tile.run_id = %(run)s AND tile.writer = block.writer AND tile.seq = block.seq
            AND tile.location IS NOT NULL)
"""


def with_bodies(run_id: UUID, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Replace the end of rows, (offsets, body, location), by (offsets, body), in the same order.

    Bodies in the cold store are read for many rows at once. If there are offsets, the body has only the
    series that begin at these.

    Raises:
        ColdStoreError: a body cannot be read.
    """
    waiting: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        if row[-1] is None and not waiting:
            yield row[:-1]
            continue
        waiting.append(row)
        size += len(row[-2]) if row[-1] is None else BodyLocation.unpack(row[-1]).size
        if size >= MAX_BYTES:
            yield from _with_bodies(run_id, waiting)
            waiting, size = [], 0
    yield from _with_bodies(run_id, waiting)


def _with_bodies(run_id: UUID, rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    cold = [BodyLocation.unpack(row[-1]) for row in rows if row[-1] is not None]
    bodies = iter(read_bodies(run_id, cold) if cold else [])
    for *front, offsets, body, location in rows:
        if location is not None:
            body = memoryview(next(bodies))
            if len(offsets):
                body = body[offsets[0] : offsets[-1]]
        yield (*front, offsets, body)


def bodies_of(run_id: UUID, rows: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The bodies of rows that have (body, location)."""
    return [body for _, body in with_bodies(run_id, [((), body, location) for body, location in rows])]


def fill_histograms(run_id: UUID, rows: Sequence[Histogram]) -> None:
    """Read the bodies of these histograms."""
    for row, body in zip(rows, bodies_of(run_id, [(row.body, row.location) for row in rows]), strict=True):
        row.body = body


def cold_blocks(run_id: UUID) -> set[tuple[UUID, int]]:
    """The blocks of a run with values in the cold store: their writers and seqs."""
    if not ColdFile.objects.filter(run_id=run_id).exists():
        return set()
    return set(
        sql.fetch(
            """
            SELECT DISTINCT writer, seq FROM telemetry_tile
            WHERE run_id = %(run)s AND location IS NOT NULL
            """,
            {"run": run_id},
        )
    )


def explained(error: ColdStoreError) -> str:
    """Say in a sentence which values cannot be read, and why."""
    last = None
    if error.run_id is not None:
        ((last,),) = sql.fetch(_LAST_STEP, {"run": error.run_id})
    values = "Old values" if last is None else f"The values before step {last + 1:,}"
    return f"{values} are in the cold store, which {error.reason}."
