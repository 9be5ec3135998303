"""Runs in a project of Trackio: a SQLite file with a row for each call of `log`."""

import json
from collections.abc import Iterator
from typing import Any, Final

from fp8scope.importing.limits import MAX_RUNS
from fp8scope.importing.media import MediaReader
from fp8scope.importing.model import SourceMedia, SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.sqlite_file import SqliteDatabase, has_tables, open_database
from fp8scope.importing.tables import RowTables
from fp8scope.importing.values import mapping_of, micros_of, seconds_of, seed_of, step_of, storable
from fp8scope.recording.media import TABLE_ROWS

TABLES: Final = {"metrics": {"run_name", "timestamp", "step", "metrics"}, "configs": {"run_name", "config"}}


def matches(candidate: SourcePath) -> bool:
    """A database with Trackio's tables."""
    return has_tables(candidate, TABLES)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the runs of the project."""
    with open_database(source.path) as database:
        # Runs have ids since version 0.20; before, their names identify them.
        identity = "run_id" if "run_id" in database.columns("metrics") else "run_name"
        configs = _configs(database, identity)
        runs: dict[str, str] = {key: name for key, (name, _) in configs.items()}
        for block in database.rows("metrics", (f"{identity}", "run_name"), order="id"):
            for key, name in block:
                runs.setdefault(str(key), str(name))
            if len(runs) > MAX_RUNS:
                raise UnreadableError(f"{source.path} has more than {MAX_RUNS:,} runs")
        source.total = len(runs)
        for key, name in sorted(runs.items()):
            yield _run(source, database, identity, key, name, configs.get(key, ("", {}))[1])
            source.done += 1


def _configs(database: SqliteDatabase, identity: str) -> dict[str, tuple[str, dict[str, Any]]]:
    column = identity if identity in database.columns("configs") else "run_name"
    return {
        str(key): (str(name), _object(text))
        for block in database.rows("configs", (column, "run_name", "config"))
        for key, name, text in block
    }


def _run(
    source: ImportSource, database: SqliteDatabase, identity: str, key: str, name: str, config: dict[str, Any]
) -> SourceRun:
    notes: list[str] = []
    group = config.get("_Group")
    return SourceRun(
        key=json.dumps([source.path.stem, key]),
        name=name,
        parts=_parts(source, database, identity, key, notes),
        config={entry: storable(value) for entry, value in config.items() if not entry.startswith("_")},
        environment={"project": source.path.stem, "user": str(config.get("_Username") or "")[:200]},
        group=group if isinstance(group, str) else "",
        seed=seed_of(config),
        created_at=seconds_of(config.get("_Created")),
        notes=notes,
    )


def _parts(
    source: ImportSource, database: SqliteDatabase, identity: str, key: str, notes: list[str]
) -> Iterator[ValueTable | SourceMedia]:
    names = MetricNames(source.loss)
    media = MediaReader(source.path.parent / "media")
    rows, broken = RowTables(names), 0
    for block in database.rows("metrics", ("timestamp", "step", "metrics"), f"{identity} = ?", (key,), "id"):
        for timestamp, step, text in block:
            number, document = step_of(step), _object(text)
            if number is None or not document:
                broken += 1
                continue
            if any(isinstance(value, dict) and "_type" in value for value in document.values()):
                document = _without_media(media, number, document)
            rows.add_object(number, micros_of(timestamp), document, (None, None))
            yield from media.take()
            if rows.is_full:
                yield from rows.take()
    yield from rows.take()
    notes += names.notes() + media.notes()
    if broken:
        notes.append(f"{broken:,} rows were left out: they have no step, or no values.")


def _without_media(media: MediaReader, step: int, document: dict[str, Any]) -> dict[str, Any]:
    """Add the objects of Trackio, which say their `_type`; returns the other values."""
    rest: dict[str, Any] = {}
    for name, value in document.items():
        kind = value.get("_type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            rest[name] = value
        elif kind == "trackio.markdown" and isinstance(value.get("_value"), str):
            media.add_text(name, step, value["_value"])
        elif kind == "trackio.table" and isinstance(value.get("_value"), list):
            rows = [mapping_of(row) for row in value["_value"][: TABLE_ROWS + 1]]
            columns = list(dict.fromkeys(column for row in rows for column in row))
            media.add_table(name, step, columns, [[row.get(column) for column in columns] for row in rows])
        elif "file_path" in value:
            media.add_file(name, step, value["file_path"], caption=value.get("caption"))
        else:
            media.leave_out(f"their type {kind[:40]!r} has no kind here")
    return rest


def _object(text: Any) -> dict[str, Any]:
    try:
        return mapping_of(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}


FORMAT = FileFormat(name="trackio", title="Trackio", matches=matches, read=read)
