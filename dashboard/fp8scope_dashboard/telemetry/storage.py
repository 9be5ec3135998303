"""Measure the stored size of runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from django.contrib.postgres.fields import ArrayField
from django.db import connection, models

from fp8scope_dashboard.media.models import MediaChunk
from fp8scope_dashboard.media.services import bytes_of_run
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.models import ColdFile, ColdFileState

# Overhead of PostgreSQL per row (header, keys, line pointer, one index entry), and per long value, which is
# stored in pieces of 2,000 bytes with a header and an index entry each.
ROW_BYTES = 120
TOAST_SHARE = 1.04
LONG = (models.BinaryField, models.TextField, models.JSONField, ArrayField)


@dataclass(frozen=True)
class Storage:
    """Bytes and rows of a run by table, largest first, and its number of points.

    The bytes are the sizes of the values on disk plus the estimated overhead of PostgreSQL. `cold_bytes`:
    those of its files in the cold store.
    """

    tables: dict[str, tuple[int, int]]
    points: int
    cold_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.tables.values())

    @property
    def bytes_per_point(self) -> float | None:
        """None without points."""
        return self.bytes / self.points if self.points else None


def of_run(run_id: UUID, points: int = 0) -> Storage:
    """Measure a run with `points` stored points. Reads only the lengths of long values.

    Contents of media count for each run that names them, though they are stored once.
    """
    tables = {}
    for model, column in tables_of_runs():
        lengths = " + ".join(f'coalesce(pg_column_size("{name}"), 0)' for name in _long_columns(model)) or "0"
        table = model._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(f'SELECT sum({lengths}), count(*) FROM "{table}" WHERE "{column}" = %s', [run_id])
            size, rows = cursor.fetchone()
        if rows:
            tables[table] = (int(float(size or 0) * TOAST_SHARE) + rows * ROW_BYTES, rows)
    if named := bytes_of_run(run_id):
        tables[MediaChunk._meta.db_table] = (named, 0)
    files = ColdFile.objects.filter(run_id=run_id, state=ColdFileState.STORED)
    cold = files.aggregate(bytes=models.Sum("bytes"))["bytes"] or 0
    return Storage(dict(sorted(tables.items(), key=lambda item: -item[1][0])), points, cold)


def tables_of_runs() -> Iterator[tuple[type[models.Model], str]]:
    """Every model whose rows belong to a run, with the column of the run."""
    for relation in Run._meta.related_objects:
        if relation.field.model._meta.managed and relation.field.column:
            yield relation.field.model, relation.field.column


def _long_columns(model: type[models.Model]) -> list[str]:
    return [str(field.column) for field in model._meta.local_concrete_fields if isinstance(field, LONG)]
