"""Results of lighteval, and the details of each item in the Parquet files beside them."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fp8scope.importing.formats.scores import (
    checkpoint_of,
    date_in,
    evaluation_of,
    flat_scores,
    precision_in,
    score_table,
    step_at,
)
from fp8scope.importing.limits import MAX_FILES, MAX_ITEMS
from fp8scope.importing.model import SourceEvaluation, SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.parquet_file import open_parquet, read_batches
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.values import mapping_of, number_of, parse_json, read_json

METRIC_COLUMNS = ("metric", "metrics")


def matches(candidate: SourcePath) -> bool:
    """A JSON object with the general configuration and results."""
    text = candidate.text.lstrip()
    return text.startswith("{") and '"config_general"' in text and ('"results"' in text or len(text) > 60_000)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the model that was evaluated."""
    document = read_json(source.path)
    general = mapping_of(document.get("config_general")) if isinstance(document, dict) else {}
    if not isinstance(document, dict) or not isinstance(document.get("results"), dict):
        raise UnreadableError(f"{source.path} has no results of lighteval")
    source.total = source.done = source.path.stat().st_size
    settings = mapping_of(general.get("model_config"))
    model = str(general.get("model_name") or settings.get("model_name") or source.path.parent.name)
    training, checkpoint = checkpoint_of(model)
    notes: list[str] = []
    yield SourceRun(
        key=json.dumps([source.identity(source.path.parent), training]),
        name=Path(training).name or training,
        parts=_parts(source, document, step_at(source, checkpoint), notes),
        config={"lighteval": {"model": settings, "tasks": document.get("versions")}},
        environment={"lighteval_sha": str(general.get("lighteval_sha", ""))[:80]},
        precision=precision_in(f"{model} {settings.get('dtype', '')} {settings.get('quantization', '')}"),
        created_at=date_in(source.path),
        notes=notes,
    )


def _parts(
    source: ImportSource, document: Mapping[str, Any], step: int, notes: list[str]
) -> Iterator[ValueTable | SourceEvaluation]:
    files = _details(source.path)
    for task, path in files:
        try:
            yield from _evaluations(source, path, task, step, notes)
        except UnreadableError as error:
            notes.append(f"The details of {task} were left out: {error}.")
    names = MetricNames(source.loss)
    yield from score_table(flat_scores(mapping_of(document.get("results"))), step, names)
    notes += names.notes()
    if not files:
        notes.append(
            "There are no details: scores have no interval and no verdict. Run lighteval with --save-details."
        )


def _details(results: Path) -> list[tuple[str, Path]]:
    """The details of the same time: `details/<model>/<time>/details_<task>_<time>.parquet`."""
    moment = results.stem.removeprefix("results_")
    for root in list(results.resolve().parents)[:6]:
        if not (root / "details").is_dir():
            continue
        model = results.resolve().parent
        inner = model.relative_to(root / "results") if model.is_relative_to(root / "results") else Path(".")
        folder = root / "details" / inner / moment
        if folder.is_dir():
            names = sorted(path for path in islice(folder.iterdir(), MAX_FILES) if path.suffix == ".parquet")
            return [(path.stem.removeprefix("details_").removesuffix(f"_{moment}"), path) for path in names]
    return []


def _evaluations(
    source: ImportSource, path: Path, task: str, step: int, notes: list[str]
) -> Iterator[SourceEvaluation]:
    file = open_parquet(path)
    column = next((name for name in METRIC_COLUMNS if name in file.schema_arrow.names), None)
    if column is None:
        raise UnreadableError(f"{path.name} has no column with metrics")
    chosen = [column, *(name for name in ("doc",) if name in file.schema_arrow.names)]
    scores: dict[str, list[tuple[str, float]]] = {}
    left_out: set[str] = set()
    position = 0
    for batch in read_batches(file, path, chosen, 256):
        documents = batch.column("doc").to_pylist() if "doc" in chosen else [None] * len(batch)
        for metrics, doc in zip(batch.column(column).to_pylist(), documents, strict=True):
            identity = str(mapping_of(doc).get("id") or position)
            position += 1
            for metric, value in _numbers(metrics):
                if value is None:
                    left_out.add(metric)
                elif position <= MAX_ITEMS:
                    scores.setdefault(metric, []).append((identity, value))
    for metric, items in sorted(scores.items()):
        evaluation = evaluation_of(task, metric, items, step=step)
        if evaluation is None:
            left_out.add(metric)
        else:
            yield evaluation
    if left_out:
        notes.append(f"Of {task} were left out, as no finite numbers: {', '.join(sorted(left_out))[:300]}.")


def _numbers(metrics: Any) -> Iterator[tuple[str, float | None]]:
    """The metrics of an item: an object, or its JSON."""
    if isinstance(metrics, str):
        metrics = parse_json(metrics, "an item's metrics")
    for name, value in mapping_of(metrics).items():
        if value is not None:
            yield str(name), number_of(value)


FORMAT = FileFormat(name="lighteval", title="lighteval", matches=matches, read=read)
