"""Exports of Neptune (neptune-exporter): Parquet files with a row for each value of an attribute.

Their columns are those of neptune_exporter/model.py. A run has files from NAME_part_0.parquet on.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fp8scope.importing.limits import (
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_FILES,
    MAX_RUNS,
    MAX_SCALARS,
    MAX_SERIES_POINTS,
)
from fp8scope.importing.model import SourceRun, Steps, UnreadableError, Values, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.parquet_file import open_parquet, read_batches
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import NO_TIME, MetricHistory, tables_of
from fp8scope.importing.values import (
    FIRST_TIME,
    LAST_TIME,
    MAX_STEP,
    mapping_of,
    seconds_of,
    seed_of,
    storable,
)

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
SERIES: Final = "float_series"
ROWS_AT_ONCE: Final = 65_536
PART: Final = re.compile(r"(.+_part_)(\d{1,6})\.parquet")
History = tuple[Steps, Steps, Values]


def is_export(names: list[str]) -> bool:
    """Return whether the columns of a table are the exporter's."""
    return set(COLUMNS) <= set(names)


def matches(candidate: SourcePath) -> bool:
    """A Parquet file with the exporter's columns."""
    if not candidate.head.startswith(b"PAR1"):
        return False
    try:
        return is_export(open_parquet(candidate.path).schema_arrow.names)
    except UnreadableError:
        return False


def matches_below(candidate: SourcePath) -> bool:
    """The first file of a run, with which the others are read."""
    part = PART.fullmatch(candidate.path.name)
    return (part is None or int(part[2]) == 0) and matches(candidate)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the runs of the file and of the other parts beside it."""
    paths = _parts_of(source.path)
    source.total = sum(path.stat().st_size for path in paths)
    runs = NeptuneRuns(str(source.path))
    for path in paths:
        done = source.done
        for batch, share in _batches(path):
            runs.add(batch)
            source.done = done + round(share * path.stat().st_size)
    yield from runs.as_source_runs(source.loss)


def _parts_of(path: Path) -> list[Path]:
    """All files of a run, in their order. Raises UnreadableError if one is missing."""
    part = PART.fullmatch(path.name)
    if part is None:
        return [path]
    numbers = []
    for count, other in enumerate(path.parent.iterdir()):
        match = PART.fullmatch(other.name)
        if match is not None and match[1] == part[1] and other.is_file():
            numbers.append(int(match[2]))
        if count >= MAX_FILES:
            raise UnreadableError(f"{path.parent} has more than {MAX_FILES:,} files: import a part of it")
    if sorted(numbers) != list(range(len(numbers))):
        raise UnreadableError(
            f"{path} is a part of an export, and another part is missing: the exporter writes part 0 last"
        )
    return [path.with_name(f"{part[1]}{number}.parquet") for number in range(len(numbers))]


def _batches(path: Path) -> Iterator[tuple[Any, float]]:
    """The record batches of a file, and the share of it that is read."""
    file = open_parquet(path)
    names = [name for name in (*COLUMNS, *OPTIONAL) if name in file.schema_arrow.names]
    if not is_export(names):
        raise UnreadableError(
            f"{path} is no export of Neptune: it has no column {min(set(COLUMNS) - set(names))}"
        )
    rows = 0
    for batch in read_batches(file, path, names, ROWS_AT_ONCE):
        rows += len(batch)
        yield batch, rows / max(1, file.metadata.num_rows)


@dataclass
class _Run:
    attributes: dict[str, Any] = field(default_factory=dict)
    histories: dict[str, list[History]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    """Types of attributes that are no numbers, by their paths."""
    left_out: int = 0


class NeptuneRuns:
    """The runs of an export, from its record batches.

    `where` is named in refusals; `step_multiplier` makes whole steps of Neptune's decimal ones.
    """

    def __init__(self, where: str, step_multiplier: int = 1) -> None:
        self._where = where
        self._multiplier = step_multiplier
        self._runs: dict[tuple[str, str], _Run] = {}
        self._points = 0

    def add(self, batch: Any) -> None:
        """Add the rows of a `pyarrow.RecordBatch`.

        Raises:
            UnreadableError: a column is missing or of another type, or there are too many points or runs.
        """
        if not is_export(batch.schema.names):
            raise UnreadableError(f"{self._where} is no export of Neptune: a column is missing")
        for name in TEXTS:
            if str(batch.schema.field(name).type) not in ("string", "large_string", "string_view"):
                raise UnreadableError(
                    f"{self._where} is no export of Neptune: its column {name} has no texts"
                )
        try:
            kinds = batch.column("attribute_type").to_numpy(zero_copy_only=False).astype(str)
            self._add_series(batch, np.flatnonzero(kinds == SERIES))
            self._add_attributes(batch, kinds)
        except (ArithmeticError, TypeError, ValueError, NotImplementedError) as error:
            raise UnreadableError(f"{self._where} has a column of another type: {str(error)[:200]}") from None
        if self._points > MAX_SERIES_POINTS or len(self._runs) > MAX_RUNS:
            raise UnreadableError(
                f"{self._where} has more than {MAX_SERIES_POINTS:,} points or {MAX_RUNS:,} runs: export parts"
            )

    def as_source_runs(self, loss: str) -> Iterator[SourceRun]:
        """Yield the runs; `loss` names the metric that is the loss, or is empty."""
        for (project, identity), run in self._runs.items():
            notes: list[str] = []
            config = _nested(run.attributes)
            sys = mapping_of(config.pop("sys", None))
            tags = [tag for name in ("tags", "group_tags") for tag in _texts(sys.get(name))]
            names = (str(sys[name]) for name in ("name", "custom_run_id") if sys.get(name))
            failed = sys.get("failed") is True
            yield SourceRun(
                key=json.dumps([project, identity]),
                name=" ".join(dict.fromkeys(names)) or identity,
                parts=_parts(run, MetricNames(loss), notes),
                config=storable(config),
                environment={"neptune": storable(sys), "project": project},
                tags=[tag[:64] for tag in tags[:100]],
                seed=seed_of(config, "params", "parameters"),
                created_at=seconds_of(sys.get("creation_time")),
                failure="Neptune has the run as failed." if failed else "",
                state="failed" if failed else "finished",
                notes=notes,
            )

    def _run(self, project: Any, identity: Any) -> _Run:
        return self._runs.setdefault((str(project or ""), str(identity)), _Run())

    def _add_series(self, batch: Any, rows: Steps) -> None:
        """Add the values of series to their runs, a series of the batch at a time."""
        if not len(rows):
            return
        self._points += len(rows)
        taken = batch.take(rows)
        columns = [_Coded(taken, name) for name in ("project_id", "run_id", "attribute_path")]
        codes = np.zeros(len(rows), np.int64)
        for column in columns:
            codes = codes * (len(column.texts) + 1) + column.codes + 1
        steps, times, values, valid = _numbers(taken, self._multiplier)
        order = np.argsort(codes, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            project, identity, path = (column.at(int(part[0])) for column in columns)
            if identity is None or path is None:
                continue
            run, chosen = self._run(project, identity), part[valid[part]]
            run.left_out += len(part) - len(chosen)
            if path in run.histories or len(run.histories) < 10 * MAX_SCALARS:
                run.histories.setdefault(path, []).append((steps[chosen], times[chosen], values[chosen]))

    def _add_attributes(self, batch: Any, kinds: Any) -> None:
        """Add the single values to their runs, and the types of what is left out."""
        names = [
            name
            for name in ("run_id", "project_id", "attribute_path", *PLAIN.values())
            if name in batch.schema.names
        ]
        for row in np.flatnonzero(kinds != SERIES).tolist():
            kind = str(kinds[row])
            cells = {name: batch.column(name)[row].as_py() for name in names}
            identity, path, value = cells["run_id"], cells["attribute_path"], cells.get(PLAIN.get(kind, ""))
            if not isinstance(identity, str) or not isinstance(path, str):
                continue
            run = self._run(cells.get("project_id"), identity)
            if kind not in PLAIN:
                if len(run.others) < MAX_ENTRIES:
                    run.others[path] = kind
            # The exporter writes the attributes of all runs for each, as nothing where a run has none.
            elif value is not None and (path in run.attributes or len(run.attributes) < MAX_ENTRIES):
                run.attributes[path] = value.isoformat() if hasattr(value, "isoformat") else value


class _Coded:
    """A column of texts as numbers, -1 for none."""

    def __init__(self, batch: Any, name: str) -> None:
        self.texts: list[str | None] = []
        self.codes: Steps = np.full(len(batch), -1, np.int64)
        if name in batch.schema.names:
            encoded: Any = batch.column(name).dictionary_encode()
            self.texts = encoded.dictionary.to_pylist()
            self.codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    def at(self, row: int) -> str | None:
        """The text of a row."""
        code = int(self.codes[row])
        return None if code < 0 else self.texts[code]


def _numbers(batch: Any, multiplier: int) -> tuple[Steps, Steps, Values, Any]:
    """Steps, times (or NO_TIME), values, and which rows have a whole step from 0."""
    import pyarrow as pa  # A large package that only Parquet needs.

    # The exporter writes steps as decimal numbers of six places.
    steps = batch.column("step").cast("float64").to_numpy(zero_copy_only=False) * multiplier
    floats = batch.column("float_value")
    # It writes NaN as nothing, but with a time.
    values = floats.cast("float64").fill_null(np.nan).to_numpy(zero_copy_only=False)
    moments = batch.column("timestamp")
    times = np.full(len(steps), NO_TIME, np.int64)
    if pa.types.is_timestamp(moments.type):
        micros = moments.cast(pa.timestamp("us", tz=moments.type.tz), safe=False).cast("int64")
        times = micros.fill_null(NO_TIME).to_numpy(zero_copy_only=False)
        times = np.where((times >= FIRST_TIME * 1e6) & (times <= LAST_TIME * 1e6), times, NO_TIME)
    present = floats.is_valid().to_numpy(zero_copy_only=False) | (times != NO_TIME)
    valid = present & (steps > -0.5) & (steps <= MAX_STEP)
    steps = np.where(valid, steps, 0.0)
    whole = np.rint(steps)
    return whole.astype(np.int64), times, values, valid & (np.abs(steps - whole) < 5e-7)


def _texts(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


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


def _parts(run: _Run, names: MetricNames, notes: list[str]) -> Iterator[ValueTable]:
    metrics = []
    for path, pieces in sorted(run.histories.items()):
        steps, times, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
        metrics.append(MetricHistory(path, steps, times, values))
    yield from tables_of(metrics, names)
    notes += names.notes()
    if run.left_out:
        notes.append(f"{run.left_out:,} values were left out: their step is no whole number from 0.")
    if run.others:
        kinds = ", ".join(
            f"{count} of {kind}" for kind, count in sorted(Counter(run.others.values()).items())
        )
        notes.append(f"Attributes that are no numbers or texts were left out: {kinds[:500]}.")


FORMAT = FileFormat(
    name="neptune",
    title="Neptune export (Parquet)",
    matches=matches,
    read=read,
    matches_below=matches_below,
)
