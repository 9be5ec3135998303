"""How much room a run takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from django.contrib.postgres.fields import ArrayField
from django.db import connection, models

from fp8scope_dashboard.runs.models import Run

# PostgreSQL's own per row (header, keys, a line pointer, the entry of one index), and per long value, which
# it cuts into pieces of 2,000 bytes with a header and an index entry each.
ROW_BYTES = 120
TOAST_SHARE = 1.04
LONG = (models.BinaryField, models.TextField, models.JSONField, ArrayField)


@dataclass(frozen=True)
class Storage:
    """Bytes and rows of each table that has any of the run, largest first, and the points of the run.

    The bytes are those of the values, as compressed as they lie on disk, and an estimate (see above) of what
    PostgreSQL adds to them.
    """

    tables: dict[str, tuple[int, int]]
    points: int

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.tables.values())

    @property
    def bytes_per_point(self) -> float | None:
        """None without points."""
        return self.bytes / self.points if self.points else None


def of_run(run_id: UUID, points: int = 0) -> Storage:
    """Measure a run; `points` is how many it has stored. Reads no long value, only their lengths."""
    found = {}
    for model, column in tables_of_runs():
        lengths = " + ".join(f'coalesce(pg_column_size("{name}"), 0)' for name in _long_columns(model)) or "0"
        table = model._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(f'SELECT sum({lengths}), count(*) FROM "{table}" WHERE "{column}" = %s', [run_id])
            size, rows = cursor.fetchone()
        if rows:
            found[table] = (int(float(size or 0) * TOAST_SHARE) + rows * ROW_BYTES, rows)
    return Storage(dict(sorted(found.items(), key=lambda item: -item[1][0])), points)


def tables_of_runs() -> Iterator[tuple[type[models.Model], str]]:
    """Every model whose rows belong to one run, and the column that names it."""
    for relation in Run._meta.related_objects:
        if relation.field.model._meta.managed and relation.field.column:
            yield relation.field.model, relation.field.column


def _long_columns(model: type[models.Model]) -> list[str]:
    return [str(field.column) for field in model._meta.local_concrete_fields if isinstance(field, LONG)]
