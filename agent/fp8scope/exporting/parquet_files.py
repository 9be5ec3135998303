"""Parquet: a file for each table, with the types of docs/exporting.md."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fp8scope.exporting.content import ExportedSeries, Progress, RunContent

TIME = pa.timestamp("us", "UTC")
VALUES: list[tuple[str, pa.DataType]] = [
    ("step", pa.int64()),
    ("time", TIME),
    ("value", pa.float64()),
    ("thinned", pa.bool_()),
]
SCALAR_NAMES: list[tuple[str, pa.DataType]] = [("scalar", pa.string())]
TENSOR_NAMES: list[tuple[str, pa.DataType]] = [("tensor", pa.string()), ("statistic", pa.string())]
SCALARS, TENSORS = pa.schema([*SCALAR_NAMES, *VALUES]), pa.schema([*TENSOR_NAMES, *VALUES])
SCORE_COLUMNS: list[tuple[str, pa.DataType]] = [
    *(("name", pa.string()), ("metric", pa.string()), ("step", pa.int64()), ("kind", pa.string())),
    *(("higher_is_better", pa.bool_()), ("score", pa.float64()), ("low", pa.float64())),
    *(("high", pa.float64()), ("items", pa.int64()), ("precision", pa.string())),
]
ALERT_COLUMNS: list[tuple[str, pa.DataType]] = [
    *(("id", pa.int64()), ("kind", pa.string()), ("title", pa.string()), ("severity", pa.string())),
    *(("state", pa.string()), ("step", pa.int64()), ("earliest_step", pa.int64())),
    *(("onset_step", pa.int64()), ("value", pa.float64()), ("threshold", pa.float64())),
    *(("message", pa.string()), ("tensors", pa.list_(pa.string())), ("opened_at", TIME)),
    *(("resolved_at", TIME), ("acknowledged_at", TIME), ("acknowledged_by", pa.string())),
    ("url", pa.string()),
]
SCORES, ALERTS = pa.schema(SCORE_COLUMNS), pa.schema(ALERT_COLUMNS)
DRAFT = ".part"


def write(content: RunContent, folder: Path, progress: Progress) -> list[Path]:
    """Write scalars, tensors, evaluations and alerts, and run.json; returns the files.

    A file appears when it is complete, and replaces that of an earlier export.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drafts = {
        name: folder / f"{name}.parquet{DRAFT}" for name in ("scalars", "tensors", "evaluations", "alerts")
    }
    metadata = {b"fp8scope_run": content.run.id.encode()}
    with (
        parquet.ParquetWriter(drafts["scalars"], SCALARS.with_metadata(metadata)) as scalars,
        parquet.ParquetWriter(drafts["tensors"], TENSORS.with_metadata(metadata)) as tensors,
    ):
        for series in content.series(progress):
            if series.scalar:
                scalars.write_table(_table({"scalar": series.scalar}, series, SCALARS))
            else:
                names = {"tensor": series.tensor, "statistic": series.statistic}
                tensors.write_table(_table(names, series, TENSORS))
    for name, rows, schema in (
        ("evaluations", list(_scores(content)), SCORES),
        ("alerts", list(_alerts(content)), ALERTS),
    ):
        parquet.write_table(_rows(rows, schema), drafts[name])
    (folder / f"run.json{DRAFT}").write_text(json.dumps(content.run.fields, indent=1))
    written = []
    for draft in (*drafts.values(), folder / f"run.json{DRAFT}"):
        path = draft.with_name(draft.name.removesuffix(DRAFT))
        draft.replace(path)
        written.append(path)
    return written


def _table(names: dict[str, str], series: ExportedSeries, schema: pa.Schema) -> pa.Table:
    """The rows of a series. NaN is a value, not null."""
    rows = len(series.steps)
    microseconds = series.times.astype("datetime64[us]").astype(np.int64)
    columns: list[Any] = [pa.array([name] * rows, pa.string()) for name in names.values()]
    columns += [
        pa.array(series.steps, pa.int64()),
        pa.array(microseconds, pa.int64(), mask=np.isnat(series.times)).cast(TIME),
        pa.array(series.values, pa.float64(), from_pandas=False),
        pa.array(np.full(rows, series.thinned)),
    ]
    return pa.table(columns, schema=schema)


def _rows(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=schema)


def _scores(content: RunContent) -> Iterator[dict[str, Any]]:
    for score in content.scores:
        low, high = (None, None) if score.interval is None else score.interval
        yield {**vars(score), "low": low, "high": high}


def _alerts(content: RunContent) -> Iterator[dict[str, Any]]:
    for alert in content.alerts:
        yield {**vars(alert), "tensors": list(alert.tensors)}
