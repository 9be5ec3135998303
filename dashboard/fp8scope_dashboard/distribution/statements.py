"""The SQL that distributes the tables of a database, from what its catalogue says. Pure functions.

A unique constraint, and a foreign key between tables in shards, must contain the distribution column: a node
sees its own rows only. For the same reason, foreign keys to runs from tables that are not in shards go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from django.db.models import Model

from fp8scope_dashboard.distribution.layout import (
    Location,
    all_models,
    distribution_column,
    location_of,
    models_in,
    references,
)

# All tables in shards are co-located with that of runs.
ANCHOR: Final = "runs_run"
MAX_NAME: Final = 63


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A constraint of a table: `kind` is p (primary key), u (unique) or f (foreign key to `target`)."""

    table: str
    name: str
    kind: str
    columns: tuple[str, ...]
    target: str | None = None


@dataclass(frozen=True)
class StoredTables:
    """The present location of each table of the database, and the constraints of all tables."""

    locations: Mapping[str, Location]
    constraints: Sequence[Constraint]

    def is_at(self, model: type[Model], location: Location) -> bool:
        return self.locations.get(model._meta.db_table) is location


def statements(catalogue: StoredTables, shards: int) -> list[str]:
    """The statements that lead from the catalogue to the layout, in their order; none if it is there.

    Each may be the last one that is carried out: the next call goes on from there.

    Args:
        shards: the number of shards, if no table has any yet.
    """
    return [
        *_dropped_keys(catalogue),
        *_on_every_node(catalogue),
        *_in_shards(catalogue, shards),
        *_foreign_keys(catalogue),
    ]


def wide_key(constraint: Constraint, column: str) -> str:
    """Append the distribution column to a unique constraint: its index serves the same searches."""
    kind = "PRIMARY KEY" if constraint.kind == "p" else "UNIQUE"
    return (
        f"ALTER TABLE {_quoted(constraint.table)} DROP CONSTRAINT {_quoted(constraint.name)}, "
        f"ADD CONSTRAINT {_quoted(constraint.name)} {kind} ({_listed((*constraint.columns, column))})"
    )


def _dropped_keys(catalogue: StoredTables) -> Iterator[str]:
    """Foreign keys to tables that are distributed next; those between tables in shards are made again."""
    targets = {model._meta.db_table for model in models_in(Location.SHARDS)}
    for constraint in catalogue.constraints:
        of_shards = catalogue.locations.get(constraint.table) is Location.SHARDS
        if constraint.kind == "f" and constraint.target in targets and not of_shards:
            yield f"ALTER TABLE {_quoted(constraint.table)} DROP CONSTRAINT {_quoted(constraint.name)}"


def _on_every_node(catalogue: StoredTables) -> Iterator[str]:
    for model in models_in(Location.EVERY_NODE):
        if not catalogue.is_at(model, Location.EVERY_NODE):
            table = model._meta.db_table
            yield f"SELECT create_reference_table('{table}')"
            yield f"SELECT truncate_local_data_after_distributing_table('{table}')"


def _in_shards(catalogue: StoredTables, shards: int) -> Iterator[str]:
    for model in models_in(Location.SHARDS):
        table, column = model._meta.db_table, distribution_column(model)
        if catalogue.is_at(model, Location.SHARDS):
            continue
        for constraint in catalogue.constraints:
            if constraint.table == table and constraint.kind in "pu" and column not in constraint.columns:
                yield wide_key(constraint, column)
        beside = f"shard_count := {shards}" if table == ANCHOR else f"colocate_with := '{ANCHOR}'"
        yield f"SELECT create_distributed_table('{table}', '{column}', {beside})"
        yield f"SELECT truncate_local_data_after_distributing_table('{table}')"


def _foreign_keys(catalogue: StoredTables) -> Iterator[str]:
    """The foreign keys that the database lacks, among those that it can have."""
    present = {
        (constraint.table, constraint.columns[0], constraint.target)
        for constraint in catalogue.constraints
        if constraint.kind == "f"
    }
    for model in sorted(all_models(), key=lambda model: model._meta.db_table):
        of_shards = location_of(model) is Location.SHARDS
        for column, target in references(model):
            to_shards = location_of(target) is Location.SHARDS
            if to_shards and not of_shards:
                continue
            key = (model._meta.db_table, column, target._meta.db_table)
            # What is there now is dropped first.
            moves = to_shards and not catalogue.is_at(model, Location.SHARDS)
            if key not in present or moves:
                yield foreign_key(model, column, target)


def foreign_key(model: type[Model], column: str, target: type[Model]) -> str:
    """Make a foreign key; between tables in shards it contains the run's id, and rows go with their run."""
    table, named = model._meta.db_table, target._meta.db_table
    assert target._meta.pk is not None
    here, there, action = [column], [str(target._meta.pk.column)], ""
    if location_of(target) is Location.SHARDS:
        action = " ON DELETE CASCADE"
        if there != [distribution_column(target)]:
            here.append(distribution_column(model))
            there.append(distribution_column(target))
    name = f"{table}_{column}_fkey"[:MAX_NAME]
    return (
        f"ALTER TABLE {_quoted(table)} ADD CONSTRAINT {_quoted(name)} FOREIGN KEY ({_listed(here)}) "
        f"REFERENCES {_quoted(named)} ({_listed(there)}){action} DEFERRABLE INITIALLY DEFERRED"
    )


def _quoted(name: str) -> str:
    return f'"{name}"'


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(_quoted(column) for column in columns)
