"""JSONL files: an object a line, with the step, the time and the metrics; nested objects are flattened."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fp8scope.importing.formats.plain import ColumnRoles, has_step, plain_run
from fp8scope.importing.model import SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import RowTables
from fp8scope.importing.values import micros_of, read_json, step_of


def matches(candidate: SourcePath) -> bool:
    """The first line is an object of its own; or the state of a Hugging Face trainer."""
    return is_trainer_state(candidate) or _first_object(candidate) is not None


def matches_below(candidate: SourcePath) -> bool:
    """Lines with a step, in a file that is called so."""
    if is_trainer_state(candidate):
        return True
    if candidate.path.suffix.lower() not in (".jsonl", ".ndjson"):
        return False
    first = _first_object(candidate)
    return first is not None and has_step(first)


def _first_object(candidate: SourcePath) -> dict[str, Any] | None:
    """The object in the first line, if it is one of metrics; samples of evaluations are none."""
    first, _, _ = candidate.text.lstrip().partition("\n")
    if not first.startswith("{") or not first.rstrip().endswith("}"):
        return None
    try:
        document = json.loads(first)
    except (ValueError, RecursionError):
        return None
    return None if not isinstance(document, dict) or "filtered_resps" in document else document


def is_trainer_state(candidate: SourcePath) -> bool:
    """Return whether the file is `trainer_state.json` of a Hugging Face trainer."""
    return candidate.path.name == "trainer_state.json" and candidate.text.lstrip().startswith("{")


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the file."""
    notes: list[str] = []
    if is_trainer_state(SourcePath(source.path)):
        document = read_json(source.path)
        history = document.get("log_history") if isinstance(document, dict) else None
        if not isinstance(history, list):
            raise UnreadableError(f"{source.path} has no log_history: is it the state of a trainer?")
        run = plain_run(source, _parts(source, iter(history), notes), notes)
        run.total_steps = step_of(document.get("max_steps")) or None
        yield run
        return
    yield plain_run(source, _parts(source, _objects(source), notes), notes)


def _objects(source: ImportSource) -> Iterator[Any]:
    for line in source.lines():
        if not line:
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


def _parts(source: ImportSource, objects: Iterator[Any], notes: list[str]) -> Iterator[ValueTable]:
    names = MetricNames(source.loss)
    rows, roles = RowTables(names), _Roles(source)
    counter = broken = 0
    for document in objects:
        if not isinstance(document, dict):
            broken += 1
            continue
        if not roles.are_known:
            roles.find(document)
        step = counter if roles.step is None else step_of(document.get(roles.step))
        if step is None:
            broken += 1
            continue
        counter += 1
        time_us = None if roles.time is None else micros_of(document.get(roles.time))
        rows.add_object(step, time_us, document, (roles.step, roles.time))
        if rows.is_full:
            yield from rows.take()
    yield from rows.take()
    if not counter:
        raise UnreadableError(f"{source.path} has no line with an object and a step; see --step-column")
    notes += [f"{broken:,} lines were skipped: they are no objects, or have no step."] if broken else []
    notes += (
        ["No key is the step: lines are counted from 0. See --step-column."] if roles.step is None else []
    )
    notes += names.notes()


class _Roles:
    """The keys of the step and the time, from the first object."""

    def __init__(self, source: ImportSource) -> None:
        self._source = source
        self.are_known = False
        self.step: str | None = source.step_column or None
        self.time: str | None = source.time_column or None

    def find(self, document: Mapping[str, Any]) -> None:
        self.are_known = True
        keys = list(document)
        roles = ColumnRoles.of(keys, ImportSource(path=self._source.path))
        if self.step is None and roles.step is not None:
            self.step = keys[roles.step]
        if self.time is None and roles.time is not None:
            self.time = keys[roles.time]


FORMAT = FileFormat(name="jsonl", title="JSONL", matches=matches, read=read, matches_below=matches_below)
