"""Parquet files: a column for the step, and one for each metric. Needs pyarrow (`fp8scope[import]`)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope.importing.formats import neptune
from fp8scope.importing.formats.plain import ColumnRoles, has_step, plain_run
from fp8scope.importing.limits import CELLS_OF_A_TABLE, ROWS_OF_A_TABLE
from fp8scope.importing.model import SourceRun, Steps, UnreadableError, Values, ValueTable
from fp8scope.importing.names import LOSS, MetricNames
from fp8scope.importing.parquet_file import open_parquet, read_batches
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.values import MAX_STEP, micros_of


def matches(candidate: SourcePath) -> bool:
    """The file begins as Parquet does."""
    return candidate.head.startswith(b"PAR1")


def matches_below(candidate: SourcePath) -> bool:
    """A table with a step that is no later file of a run of Neptune."""
    if not matches(candidate):
        return False
    try:
        names = open_parquet(candidate.path).schema_arrow.names
        return has_step(names) and not neptune.is_export(names)
    except UnreadableError:
        return candidate.path.suffix == ".parquet"


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the file."""
    notes: list[str] = []
    yield plain_run(source, _parts(source, notes), notes)


def _parts(source: ImportSource, notes: list[str]) -> Iterator[ValueTable]:
    file = open_parquet(source.path)
    header = file.schema_arrow.names
    roles, names = ColumnRoles.of(header, source), MetricNames(source.loss)
    numeric = [index for index, field in enumerate(file.schema_arrow) if _is_numeric(field.type)]
    metrics = [index for index in numeric if index not in (roles.step, roles.time)]
    chosen = [index for index in (roles.step, roles.time) if index is not None]
    length = max(1, min(ROWS_OF_A_TABLE, CELLS_OF_A_TABLE // max(1, len(metrics))))
    total, skipped, counter = max(1, file.metadata.num_rows), 0, 0
    columns_read = [header[index] for index in (*metrics, *chosen)]
    for batch in read_batches(file, source.path, columns_read, length):
        steps = np.arange(counter, counter + len(batch))
        valid = np.ones(len(batch), np.bool_)
        if roles.step is not None:
            steps, valid = _steps(batch.column(header[roles.step]), source)
        times = None if roles.time is None else _times(batch.column(header[roles.time]))
        columns = {header[index]: _values(batch.column(header[index])) for index in metrics}
        skipped += int(np.count_nonzero(~valid))
        counter += len(batch)
        source.done = source.total * counter // total
        if valid.any():
            yield _table(names, steps, times, columns, np.flatnonzero(valid))
    notes += roles.notes(skipped, [header[i] for i in range(len(header)) if i not in (*numeric, *chosen)])
    notes += names.notes()


def _table(
    names: MetricNames,
    steps: Steps,
    times: Steps | None,
    columns: dict[str, tuple[Values, NDArray[np.bool_]]],
    rows: NDArray[np.int64],
) -> ValueTable:
    order = rows[np.argsort(steps[rows], kind="stable")]
    scalars: dict[str, Values] = {}
    missing: dict[str, NDArray[np.bool_]] = {}
    for raw, (values, absent) in columns.items():
        name = names.of(raw)
        if name is None or absent[order].all():
            continue
        for target in (name, LOSS) if names.is_loss(raw) and LOSS not in columns else (name,):
            scalars[target] = values[order]
            if absent[order].any():
                missing[target] = absent[order]
    return ValueTable(
        steps=steps[order],
        times=None if times is None else times[order],
        scalars=scalars,
        missing=missing,
    )


def _steps(column: Any, source: ImportSource) -> tuple[Steps, NDArray[np.bool_]]:
    try:
        values = column.cast("float64").to_numpy(zero_copy_only=False)
        exact = column.fill_null(0).cast("int64", safe=False).to_numpy(zero_copy_only=False)
    except Exception as error:
        raise UnreadableError(f"{source.path}: the column of the step has no numbers: {error}") from None
    valid = np.isfinite(values) & (values >= 0) & (values < MAX_STEP)
    return np.where(valid, exact, 0).astype(np.int64), valid & (np.floor(values) == values)


def _times(column: Any) -> Steps | None:
    import pyarrow as pa  # A large package that only Parquet needs.

    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us")).cast("int64").fill_null(0).to_numpy(zero_copy_only=False)
        listed = [micros_of(value / 1e6) for value in micros.tolist()]
    else:
        listed = [micros_of(value) for value in column.to_pylist()]
    if any(moment is None for moment in listed):
        return None
    return np.array(listed, np.int64)


def _values(column: Any) -> tuple[Values, NDArray[np.bool_]]:
    absent = column.is_null().to_numpy(zero_copy_only=False)
    values = column.fill_null(0).cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return np.where(absent, 0.0, values), np.asarray(absent, np.bool_)


def _is_numeric(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


FORMAT = FileFormat(name="parquet", title="Parquet", matches=matches, read=read, matches_below=matches_below)
