"""Exports of Neptune (neptune-exporter): Parquet files with a row for each value of an attribute.

Their columns are run_id, attribute_path, attribute_type, step, timestamp, and one for each type of value.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fp8scope.importing.limits import MAX_DEPTH, MAX_ENTRIES, MAX_RUNS, MAX_SCALARS, MAX_SERIES_POINTS
from fp8scope.importing.model import SourceRun, Steps, UnreadableError, Values, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.parquet_file import open_parquet, read_batches
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import MetricHistory, tables_of
from fp8scope.importing.values import FIRST_TIME, LAST_TIME, MAX_STEP, mapping_of, seconds_of, storable

COLUMNS: Final = ("run_id", "attribute_path", "attribute_type", "step", "timestamp", "float_value")
TEXTS: Final = COLUMNS[:3]
OPTIONAL: Final = (
    "project_id",
    "int_value",
    "string_value",
    "bool_value",
    "datetime_value",
    "string_set_value",
)
PLAIN: Final = {
    "int": "int_value",
    "float": "float_value",
    "string": "string_value",
    "bool": "bool_value",
    "datetime": "datetime_value",
    "string_set": "string_set_value",
}
ROWS_AT_ONCE: Final = 65_536
History = tuple[Steps, Steps, Values]


def matches(candidate: SourcePath) -> bool:
    """A Parquet file with the exporter's columns."""
    if not candidate.head.startswith(b"PAR1"):
        return False
    try:
        return set(COLUMNS) <= set(open_parquet(candidate.path).schema_arrow.names)
    except UnreadableError:
        return False


@dataclass
class _Run:
    project: str
    attributes: dict[str, Any] = field(default_factory=dict)
    histories: dict[str, list[History]] = field(default_factory=dict)
    left_out: int = 0


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the runs of the file."""
    runs = _runs_in(source)
    for identity, run in runs.items():
        notes: list[str] = []
        config = _nested(run.attributes)
        sys = mapping_of(config.pop("sys", None))
        tags: Any = sys.get("tags")
        yield SourceRun(
            key=json.dumps([run.project, identity]),
            name=str(sys.get("name") or identity),
            parts=_parts(source, run, notes),
            config=storable(config),
            environment={"neptune": storable(sys), "project": run.project},
            tags=[str(tag)[:64] for tag in tags[:100]] if isinstance(tags, list) else [],
            created_at=seconds_of(sys.get("creation_time")),
            failure="Neptune has the run as failed." if sys.get("failed") is True else "",
            state="failed" if sys.get("failed") is True else "finished",
            notes=notes,
        )


def _runs_in(source: ImportSource) -> dict[str, _Run]:
    file = open_parquet(source.path)
    source.total = source.path.stat().st_size
    names = [name for name in (*COLUMNS, *OPTIONAL) if name in file.schema_arrow.names]
    if not set(COLUMNS) <= set(names):
        raise UnreadableError(
            f"{source.path} is no export of Neptune: it has no column {min(set(COLUMNS) - set(names))}"
        )
    for name in TEXTS:
        if str(file.schema_arrow.field(name).type) not in ("string", "large_string", "string_view"):
            raise UnreadableError(f"{source.path} is no export of Neptune: its column {name} has no texts")
    runs: dict[str, _Run] = {}
    points = read_rows = 0
    for batch in read_batches(file, source.path, names, ROWS_AT_ONCE):
        try:
            points += _add_series(runs, batch)
            _add_attributes(runs, batch)
        except (ArithmeticError, TypeError, ValueError, NotImplementedError) as error:
            raise UnreadableError(f"{source.path} has a column of another type: {str(error)[:200]}") from None
        read_rows += len(batch)
        source.done = source.total * read_rows // max(1, file.metadata.num_rows)
        if points > MAX_SERIES_POINTS or len(runs) > MAX_RUNS:
            raise UnreadableError(
                f"{source.path} has more than {MAX_SERIES_POINTS:,} points or {MAX_RUNS:,} runs: export parts"
            )
    return runs


def _add_series(runs: dict[str, _Run], batch: Any) -> int:
    """Add the values of series to their runs, a series of the batch at a time; returns their number."""
    import pyarrow as pa  # A large package that only Parquet needs.

    rows = np.flatnonzero(batch.column("attribute_type").to_numpy(zero_copy_only=False) == "float_series")
    if not len(rows):
        return 0
    taken = batch.take(pa.array(rows))
    identities: Any = taken.column("run_id").dictionary_encode()
    paths: Any = taken.column("attribute_path").dictionary_encode()
    projects: Any = taken.column("project_id") if "project_id" in taken.schema.names else None
    steps, times, values, valid = _numbers(batch, rows)
    width = max(1, len(paths.dictionary))
    codes = _codes(identities) * width + _codes(paths)
    order = np.argsort(codes, kind="stable")
    bounds = np.flatnonzero(np.diff(codes[order])) + 1
    for part in np.split(order, bounds):
        code = int(codes[part[0]])
        if _codes(identities)[part[0]] < 0 or _codes(paths)[part[0]] < 0:
            continue
        project = "" if projects is None else str(projects[int(part[0])].as_py() or "")
        run = runs.setdefault(str(identities.dictionary[code // width].as_py()), _Run(project))
        path = str(paths.dictionary[code % width].as_py())
        chosen = part[valid[part]]
        run.left_out += len(part) - len(chosen)
        if path in run.histories or len(run.histories) < 10 * MAX_SCALARS:
            run.histories.setdefault(path, []).append((steps[chosen], times[chosen], values[chosen]))
    return len(rows)


def _codes(column: Any) -> Steps:
    return np.asarray(column.indices.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)


def _numbers(batch: Any, rows: Steps) -> tuple[Steps, Steps, Values, Any]:
    """Steps, times (-1 for none), values, and which have a whole number from 0 as step."""
    import pyarrow as pa

    # The exporter writes steps as decimal numbers.
    steps = batch.column("step").cast("float64").to_numpy(zero_copy_only=False)[rows]
    values = (
        batch.column("float_value").cast("float64").fill_null(np.nan).to_numpy(zero_copy_only=False)[rows]
    )
    moments = batch.column("timestamp")
    times = np.full(len(rows), -1, np.int64)
    if pa.types.is_timestamp(moments.type):
        micros = moments.cast(pa.timestamp("us", tz=moments.type.tz), safe=False).cast("int64")
        times = micros.fill_null(-1).to_numpy(zero_copy_only=False)[rows]
        times = np.where((times >= FIRST_TIME * 1e6) & (times <= LAST_TIME * 1e6), times, -1)
    present = batch.column("float_value").is_valid().to_numpy(zero_copy_only=False)[rows]
    valid = present & (steps >= 0) & (steps <= MAX_STEP)
    steps = np.where(valid, steps, 0.0)
    return steps.astype(np.int64), times, values, valid & (np.floor(steps) == steps)


def _add_attributes(runs: dict[str, _Run], batch: Any) -> None:
    """Add the single values to their runs."""
    kinds = batch.column("attribute_type").to_numpy(zero_copy_only=False)
    names = [
        name
        for name in ("run_id", "project_id", "attribute_path", *PLAIN.values())
        if name in batch.schema.names
    ]
    for row in np.flatnonzero(np.isin(kinds.astype(str), list(PLAIN))).tolist():
        cells = {name: batch.column(name)[row].as_py() for name in names}
        identity, path = cells["run_id"], cells["attribute_path"]
        if not isinstance(identity, str) or not isinstance(path, str):
            continue
        run = runs.setdefault(identity, _Run(str(cells.get("project_id") or "")))
        if path in run.attributes or len(run.attributes) < MAX_ENTRIES:
            value: Any = cells.get(PLAIN[kinds[row]])
            run.attributes[path] = value.isoformat() if hasattr(value, "isoformat") else value


def _nested(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes by their paths as nested mappings; one that is a mapping as well keeps its path."""
    nested: dict[str, Any] = {}
    for path, value in sorted(attributes.items()):
        *parents, name = path.split("/")
        target: Any = nested
        for parent in parents[:MAX_DEPTH]:
            target = target.setdefault(parent, {}) if isinstance(target, dict) else None
        if isinstance(target, dict) and len(parents) <= MAX_DEPTH and name not in target:
            target[name] = value
        else:
            nested[path] = value
    return nested


def _parts(source: ImportSource, run: _Run, notes: list[str]) -> Iterator[ValueTable]:
    metrics = []
    for path, pieces in sorted(run.histories.items()):
        steps, times, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
        metrics.append(MetricHistory(path, steps, times if (times >= 0).all() else None, values))
    names = MetricNames(source.loss)
    yield from tables_of(metrics, names)
    notes += names.notes()
    if run.left_out:
        notes.append(f"{run.left_out:,} values were left out: their step is no whole number from 0.")


FORMAT = FileFormat(name="neptune", title="Neptune export (Parquet)", matches=matches, read=read)
