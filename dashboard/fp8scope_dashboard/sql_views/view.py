"""The parts of the definition of a view: its columns, each with its expression and what it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Not that of a user: PostgreSQL would make the tables of a user of this name in it.
SCHEMA: Final = "fp8scope_views"


@dataclass(frozen=True)
class ViewColumn:
    """A column of a view: its name, the SQL expression, and its meaning with the unit."""

    name: str
    expression: str
    meaning: str


@dataclass(frozen=True)
class View:
    """A view: `source` is what follows its list of columns, `before` the WITH clause, if it has one."""

    name: str
    meaning: str
    columns: Sequence[ViewColumn]
    source: str
    before: str = ""

    @property
    def statement(self) -> str:
        """The SQL that makes it. No condition of a reader is tried on rows that the view leaves out."""
        listed = ",\n    ".join(f'{column.expression} AS "{column.name}"' for column in self.columns)
        created = f"CREATE VIEW {SCHEMA}.{self.name} WITH (security_barrier) AS"
        return f"{created}\n{self.before}SELECT\n    {listed}\n{self.source}"


def columns_of(table: str, **meanings: str) -> list[ViewColumn]:
    """Columns that have the name that they have in their table."""
    return [ViewColumn(name, f"{table}.{name}", meaning) for name, meaning in meanings.items()]


def run_columns(table: str) -> list[ViewColumn]:
    """The columns that name the run and its project."""
    return [
        ViewColumn("run_id", f"{table}.run_id", "Id of the run."),
        ViewColumn("project_id", "project.project_id", "Id of its project."),
    ]


def joined_runs(table: str, key: str = "run_id") -> str:
    """A table of runs, with the runs that the login may read."""
    return (
        f"FROM {table}\n"
        f"JOIN runs_run AS run ON run.id = {table.split()[-1]}.{key} AND run.deleted_at IS NULL\n"
        f"JOIN {SCHEMA}.projects AS project ON project.project_id = run.project_id"
    )
