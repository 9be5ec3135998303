"""Summaries of OpenCompass: a CSV with a column for each model, and the results of items beside it."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.formats.scores import (
    checkpoint_of,
    evaluation_of,
    precision_in,
    score_table,
    step_at,
)
from fp8scope.importing.limits import MAX_RUNS
from fp8scope.importing.model import SourceEvaluation, SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.values import mapping_of, number_in, read_bytes, read_json

HEADER: Final = ["dataset", "version", "metric", "mode"]
MAX_SUMMARY: Final = 64 << 20


def matches(candidate: SourcePath) -> bool:
    """The header of a summary."""
    return candidate.text.removeprefix("\ufeff").startswith(",".join(HEADER) + ",")


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield a run for each model."""
    text = read_bytes(source.path, MAX_SUMMARY).decode("utf-8", "replace").removeprefix("\ufeff")
    try:
        rows = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise UnreadableError(f"{source.path} is not CSV: {error}") from None
    if not rows or rows[0][:4] != HEADER or not 5 <= len(rows[0]) <= MAX_RUNS:
        raise UnreadableError(
            f"{source.path} is no summary of OpenCompass: it begins with {','.join(HEADER)}"
        )
    source.total = source.done = source.path.stat().st_size
    for column, model in enumerate(rows[0][4:], 4):
        training, checkpoint = checkpoint_of(model)
        notes: list[str] = []
        yield SourceRun(
            key=json.dumps([source.identity(source.path), model]),
            name=training,
            parts=_parts(source, rows[1:], column, model, step_at(source, checkpoint), notes),
            config={"opencompass": {"model": model, "summary": source.path.name}},
            precision=precision_in(model),
            notes=notes,
        )


def _parts(
    source: ImportSource, rows: Sequence[Sequence[str]], column: int, model: str, step: int, notes: list[str]
) -> Iterator[ValueTable | SourceEvaluation]:
    scores: dict[str, float] = {}
    items = 0
    for row in rows:
        if len(row) <= column or (value := number_in(row[column])) is None:
            continue
        dataset, metric, mode = row[0], row[2], row[3]
        label = f"{dataset}/{metric}"
        scores[label if label not in scores else f"{label}/{mode}"] = value
        evaluation = _evaluation(source.path, model, dataset, metric, step)
        if evaluation is not None:
            items += 1
            yield evaluation
    names = MetricNames(source.loss)
    yield from score_table(scores, step, names)
    notes += names.notes()
    if not items:
        notes.append(
            "There are no items: scores have no interval and no verdict. Keep results/ beside summary/, run "
            "OpenCompass with --dump-eval-details."
        )


def _evaluation(summary: Path, model: str, dataset: str, metric: str, step: int) -> SourceEvaluation | None:
    """The items of a dataset in `results/<model>/<dataset>.json`, if they say which are correct."""
    root = summary.resolve().parent.parent / "results"
    path = root / model / f"{dataset}.json"
    try:
        if not path.resolve().is_relative_to(root) or not path.is_file():
            return None
        details = mapping_of(mapping_of(read_json(path)).get("details"))
    except (UnreadableError, OSError, ValueError):
        # Names in the summary need not be names of files.
        return None
    items = [
        (str(key), float(correct))
        for key, entry in details.items()
        if isinstance(entry, dict) and (correct := _correct(entry)) is not None
    ]
    return evaluation_of(dataset, metric, items, step=step)


def _correct(entry: dict[str, Any]) -> bool | None:
    value = entry.get("correct", entry.get("cascade_correct"))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, bool) else None


FORMAT = FileFormat(name="opencompass", title="OpenCompass", matches=matches, read=read)
