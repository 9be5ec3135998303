"""Runs in MLflow's database, if it is SQLite."""

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from fp8scope.importing.formats.mlflow_values import (
    LARGEST,
    config_of,
    failure_of,
    state_of,
    tags_of,
)
from fp8scope.importing.limits import MAX_RUNS, MAX_SCALARS, MAX_SERIES_POINTS
from fp8scope.importing.model import SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.sqlite_file import SqliteDatabase, has_tables, open_database
from fp8scope.importing.tables import MetricHistory, tables_of
from fp8scope.importing.values import MAX_STEP, number_of, seconds_of, seed_of

TABLES: Final = {
    "runs": {"run_uuid", "status", "start_time", "lifecycle_stage"},
    "metrics": {"run_uuid", "key", "value", "timestamp", "step"},
    "params": {"run_uuid", "key", "value"},
}
MILLISECONDS: Final = (946_684_800_000, 7_258_118_400_000)
TYPES: Final = (frozenset((float,)), frozenset((int,)), frozenset((int,)), frozenset((int,)))
"""Of value, timestamp, step and is_nan, in rows that MLflow writes."""
History = tuple["array[int]", "array[int]", "array[float]"]


def matches(candidate: SourcePath) -> bool:
    """A database with MLflow's tables."""
    return has_tables(candidate, TABLES)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the runs that are not deleted."""
    with open_database(source.path) as database:
        columns = ("run_uuid", "name", "status", "start_time", "end_time", "experiment_id")
        runs = [
            row for block in database.rows("runs", columns, "lifecycle_stage = 'active'") for row in block
        ]
        if len(runs) > MAX_RUNS:
            raise UnreadableError(f"{source.path} has more than {MAX_RUNS:,} runs")
        source.total = len(runs)
        experiments = {
            row[0]: str(row[1])
            for block in database.rows("experiments", ("experiment_id", "name"))
            for row in block
        }
        for identity, name, status, started, ended, experiment in runs:
            params = _pairs(database, "params", identity)
            tags = dict(_pairs(database, "tags", identity))
            config = config_of(params)
            notes: list[str] = []
            yield SourceRun(
                key=json.dumps(["mlflow", str(identity)]),
                name=str(tags.get("mlflow.runName") or name or identity),
                parts=_parts(source, database, identity, notes),
                config=config,
                environment={
                    "experiment": experiments.get(experiment, ""),
                    "user": tags.get("mlflow.user", ""),
                },
                tags=tags_of(tags),
                seed=seed_of(config),
                created_at=seconds_of(started),
                finished_at=seconds_of(ended),
                state=state_of(status),
                failure=failure_of(status),
                notes=notes,
            )
            source.done += 1


def _pairs(database: SqliteDatabase, table: str, run: Any) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for block in database.rows(table, ("key", "value"), "run_uuid = ?", (run,)):
        pairs += [(str(key), str(value)) for key, value in block]
        if len(pairs) > 100_000:
            raise UnreadableError(f"a run has more than 100,000 {table}")
    return pairs


def _parts(
    source: ImportSource, database: SqliteDatabase, run: Any, notes: list[str]
) -> Iterator[ValueTable]:
    histories: dict[str, History] = {}
    points = broken = 0
    names = ("key", "value", "timestamp", "step", "is_nan")
    columns = names if "is_nan" in database.columns("metrics") else names[:4]
    for block in database.rows("metrics", columns, "run_uuid = ?", (run,), "rowid"):
        points += len(block)
        if points > MAX_SERIES_POINTS:
            raise UnreadableError(f"the run has more than {MAX_SERIES_POINTS:,} points")
        if not _add_block(histories, block):
            broken += sum(not _add(histories, row) for row in block)
    metrics = [
        MetricHistory(key, np.array(steps, np.int64), np.array(times, np.int64) * 1_000, _values(values))
        for key, (steps, times, values) in sorted(histories.items())
    ]
    scalars = MetricNames(source.loss)
    yield from tables_of(metrics, scalars)
    notes += scalars.notes()
    if broken:
        notes.append(f"{broken:,} values were left out: they have no number, time and step.")


def _add_block(histories: dict[str, History], block: Sequence[tuple[Any, ...]]) -> bool:
    """Add rows that are all as MLflow writes them; returns False, and adds nothing, if one is not."""
    keys, *columns = zip(*block, strict=True)
    kinds = (frozenset(map(type, column)) for column in columns)
    if set(map(type, keys)) != {str} or not all(map(frozenset.issubset, kinds, TYPES)):
        return False
    numbers, times, steps = np.array(columns[0], np.float64), np.array(columns[1]), np.array(columns[2])
    if not (_within(times, *MILLISECONDS) and _within(steps, 0, MAX_STEP)):
        return False
    if len(columns) > 3:
        numbers[np.array(columns[3], np.bool_)] = math.nan
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    if len(codes.keys() | histories.keys()) > 10 * MAX_SCALARS:
        return False
    coded = np.array([codes[key] for key in keys])
    order = np.argsort(coded, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(coded[order])) + 1)
    for key, part in zip(codes, parts, strict=True):
        history = histories.setdefault(key, (array("q"), array("q"), array("d")))
        history[0].frombytes(steps[part].tobytes())
        history[1].frombytes(times[part].tobytes())
        history[2].frombytes(numbers[part].tobytes())
    return True


def _within(numbers: Any, low: int, high: int) -> bool:
    return bool(numbers.dtype == np.int64 and low <= numbers.min() and numbers.max() <= high)


def _add(histories: dict[str, History], row: tuple[Any, ...]) -> bool:
    key, value, timestamp, step = row[:4]
    number = math.nan if len(row) > 4 and row[4] else number_of(value)
    if number is None or not (isinstance(key, str) and isinstance(step, int) and isinstance(timestamp, int)):
        return False
    if not (0 <= step <= MAX_STEP and MILLISECONDS[0] <= timestamp <= MILLISECONDS[1]):
        return False
    history = histories.get(key)
    if history is None:
        if len(histories) >= 10 * MAX_SCALARS:
            return False
        history = histories[key] = (array("q"), array("q"), array("d"))
    history[0].append(step)
    history[1].append(timestamp)
    history[2].append(number)
    return True


def _values(values: "array[float]") -> Any:
    numbers = np.array(values, np.float64)
    return np.where(np.abs(numbers) == LARGEST, np.copysign(np.inf, numbers), numbers)


FORMAT = FileFormat(name="mlflow-sqlite", title="MLflow database (SQLite)", matches=matches, read=read)
