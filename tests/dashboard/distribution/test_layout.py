"""The place of every table in a distributed store, and what Citus asks of keys and statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.apps import apps
from django.db import connection

import fp8scope_dashboard
from fp8scope_dashboard.distribution import layout
from fp8scope_dashboard.distribution.catalogue import read_constraints
from fp8scope_dashboard.distribution.layout import (
    Location,
    all_models,
    distribution_column,
    location_of,
    models_in,
    references,
)
from fp8scope_dashboard.distribution.statements import (
    Constraint,
    StoredTables,
    foreign_key,
    statements,
    wide_key,
)

pytestmark = pytest.mark.django_db

VOLATILE = re.compile(r"\b(clock_timestamp|timeofday|random|gen_random_uuid|nextval|setval)\s*\(", re.I)
WRITES = re.compile(r"\b(?:UPDATE|DELETE\s+FROM)\s+\"?(\w+)", re.I)


def sharded() -> dict[str, str]:
    """The distribution column of each table in shards."""
    return {model._meta.db_table: distribution_column(model) for model in models_in(Location.SHARDS)}


def test_it_works() -> None:
    made = statements(StoredTables({}, read_constraints(connection)), 32)
    distributed = [text for text in made if "create_distributed_table(" in text]
    everywhere = [text for text in made if "create_reference_table(" in text]
    assert distributed[0] == "SELECT create_distributed_table('runs_run', 'id', shard_count := 32)"
    assert all("colocate_with := 'runs_run'" in text for text in distributed[1:])
    assert len(distributed) == len(sharded())
    assert len(everywhere) == len(models_in(Location.EVERY_NODE))
    # Foreign keys of tables in shards may refer to those on every node, which must be there first.
    assert made.index(everywhere[-1]) < made.index(distributed[0])


def test_a_distributed_database_needs_no_statement() -> None:
    locations = {model._meta.db_table: location_of(model) for model in all_models()}
    keys = [after(constraint) for constraint in read_constraints(connection)]
    kept = [key for key in keys if not is_dropped(key)]
    assert statements(StoredTables(locations, kept), 32) == []


def test_what_a_kill_left_is_completed() -> None:
    """The tables before the kill are distributed, and the foreign keys that were dropped are not made yet."""
    done = models_in(Location.SHARDS)[:5]
    locations = {model._meta.db_table: Location.SHARDS for model in done}
    constraints = [key for key in read_constraints(connection) if not (key.kind == "f" and is_sharded(key))]
    made = statements(StoredTables(locations, constraints), 32)
    assert not any(f"table('{model._meta.db_table}'" in text for model in done for text in made)
    wanted = {
        foreign_key(model, column, target)
        for model in models_in(Location.SHARDS)
        for column, target in references(model)
        if location_of(target) is Location.SHARDS
    }
    assert wanted <= set(made)


def test_every_model_has_a_location() -> None:
    labels = {model._meta.label_lower for model in all_models()}
    assert labels == set(layout._LOCATIONS)
    assert {apps.get_model(label)._meta.label_lower for label in labels} == labels


def test_every_key_of_a_table_in_shards_contains_the_distribution_column() -> None:
    tables = sharded()
    keys = [after(key) for key in read_constraints(connection) if key.table in tables and key.kind in "pu"]
    assert {key.table for key in keys} == tables.keys()
    assert [key for key in keys if tables[key.table] not in key.columns] == []


def test_no_table_in_shards_has_a_unique_index_beside_its_constraints() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexrelid::regclass::text FROM pg_index"
            " WHERE indisunique AND indrelid = ANY(%s::regclass[])"
            " AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)",
            [list(sharded())],
        )
        assert cursor.fetchall() == []


def test_foreign_keys_between_shards_contain_the_distribution_column() -> None:
    for model in models_in(Location.SHARDS):
        for column, target in references(model):
            made = foreign_key(model, column, target)
            if location_of(target) is Location.SHARDS:
                here, there = re.findall(r"(?:FOREIGN KEY|REFERENCES \S+) \(([^)]*)\)", made)
                pairs = set(zip(here.split(", "), there.split(", "), strict=True))
                assert (f'"{distribution_column(model)}"', f'"{distribution_column(target)}"') in pairs


def test_a_foreign_key_refers_only_to_tables_that_can_have_it() -> None:
    """From shards to shards and to every node, never from elsewhere to shards."""
    made = statements(StoredTables({}, read_constraints(connection)), 32)
    added = [re.match(r'ALTER TABLE "(\w+)" ADD CONSTRAINT .* REFERENCES "(\w+)"', text) for text in made]
    pairs = {(match[1], match[2]) for match in added if match}
    assert pairs and all(table in sharded() for table, target in pairs if target in sharded())


def test_no_statement_changes_a_table_in_shards_with_a_volatile_function() -> None:
    tables = sharded()
    texts = [text for path in sources() for text in literals(path)]
    writes = [
        part
        for text in texts
        for part in text.split(";")
        if (match := WRITES.search(part)) and match[1] in tables
    ]
    assert {"runs_writer", "runs_run"} <= {match[1] for part in writes if (match := WRITES.search(part))}
    assert [part for part in writes if VOLATILE.search(part[WRITES.search(part).start() :])] == []  # type: ignore[union-attr]


def sources() -> Iterator[Path]:
    root = Path(fp8scope_dashboard.__file__).parent
    files = (path for path in root.rglob("*.py") if "replaced" not in path.parts)
    return (path for path in files if WRITES.search(path.read_text()))


def literals(path: Path) -> Iterator[str]:
    """The string literals of a module; those of an f-string as one, with its fields left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))


def is_sharded(constraint: Constraint) -> bool:
    return constraint.target in sharded()


def is_dropped(constraint: Constraint) -> bool:
    return constraint.kind == "f" and is_sharded(constraint) and constraint.table not in sharded()


def after(constraint: Constraint) -> Constraint:
    """The constraint as `wide_key` leaves it."""
    column = sharded().get(constraint.table)
    if column is None or constraint.kind == "f" or column in constraint.columns:
        return constraint
    listed = re.findall(r'"(\w+)"', wide_key(constraint, column).rpartition("(")[2])
    return Constraint(
        table=constraint.table, name=constraint.name, kind=constraint.kind, columns=tuple(listed)
    )
