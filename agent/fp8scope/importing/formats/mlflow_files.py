"""Runs in MLflow's file store: a folder with meta.yaml, metrics, params and tags."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from fp8scope.importing.formats.mlflow_values import config_of, failure_of, state_of, tags_of
from fp8scope.importing.limits import MAX_ENTRIES, MAX_SERIES_POINTS, MIB
from fp8scope.importing.media import MediaReader
from fp8scope.importing.model import SourceMedia, SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath, files_below
from fp8scope.importing.tables import MetricHistory, tables_of
from fp8scope.importing.values import (
    FIRST_TIME,
    LAST_TIME,
    MAX_STEP,
    mapping_of,
    read_bytes,
    seconds_of,
    seed_of,
)

META: Final = "meta.yaml"
MAX_SMALL: Final = MIB
LOGGED_IMAGE: Final = re.compile(
    r"images/(?P<key>[^/+%]+)[+%]step[+%](?P<step>\d{1,18})[+%]timestamp[+%]\d+[+%]"
    r"[^/+%]+(?P<small>[+%]compressed)?\.(png|webp)"
)
"""A name that `log_image` gives to an image with a key; `small` is its copy for lists."""
IMAGE_ENDINGS: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif")
TEXT_ENDINGS: Final = (".txt", ".md", ".log", ".yaml", ".yml", ".json", ".csv", ".html")
MAX_METRIC_FILE: Final = 1024 * MIB


def matches(candidate: SourcePath) -> bool:
    """The folder of a run."""
    return META in candidate.names and bool({"metrics", "params", "tags"} & candidate.names)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the folder."""
    folder = source.path
    meta = flat_yaml(folder / META)
    run_id = meta.get("run_id") or meta.get("run_uuid") or folder.name
    config = config_of(_texts(folder / "params"))
    tags = dict(_texts(folder / "tags"))
    metrics = list(files_below(folder / "metrics")) if (folder / "metrics").is_dir() else []
    source.total = sum(path.stat().st_size for path in metrics)
    notes: list[str] = []
    yield SourceRun(
        key=json.dumps(["mlflow", run_id]),
        name=tags.get("mlflow.runName") or meta.get("run_name") or run_id,
        parts=_all_parts(source, metrics, tags, notes),
        config=config,
        environment={"experiment": _experiment(folder), "user": tags.get("mlflow.user", "")},
        tags=tags_of(tags),
        seed=seed_of(config),
        created_at=seconds_of(meta.get("start_time")),
        finished_at=seconds_of(meta.get("end_time")),
        state=state_of(meta.get("status")),
        failure=failure_of(meta.get("status")),
        notes=notes,
    )


def flat_yaml(path: Path) -> dict[str, str]:
    """The entries of a YAML file of one level, as texts. MLflow writes nothing else into meta.yaml."""
    if not path.is_file():
        return {}
    entries = {}
    for line in read_bytes(path, MAX_SMALL).decode("utf-8", "replace").splitlines()[:MAX_ENTRIES]:
        name, colon, value = line.partition(":")
        if colon and name and name[0] not in " #-":
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            entries[name] = value[1:-1] if quoted else value
    return entries


def _experiment(folder: Path) -> str:
    return flat_yaml(folder.parent / META).get("name", "")


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """The files below a folder as names and texts."""
    for path in files_below(folder) if folder.is_dir() else ():
        if path.stat().st_size <= MAX_SMALL:
            yield path.relative_to(folder).as_posix(), path.read_bytes().decode("utf-8", "replace")


def _all_parts(
    source: ImportSource, metrics: list[Path], tags: Mapping[str, str], notes: list[str]
) -> Iterator[ValueTable | SourceMedia]:
    yield from _parts(source, metrics, notes)
    folder = source.path / "artifacts"
    if folder.is_dir():
        media = MediaReader(folder)
        tables = _logged_tables(tags)
        for path in files_below(folder):
            _add_artifact(media, path.relative_to(folder), tables)
            yield from media.take()
        notes += media.notes()


def _logged_tables(tags: Mapping[str, str]) -> frozenset[str]:
    """The paths that `log_table` has written to: the tag of MLflow that lists them."""
    try:
        listed = json.loads(tags.get("mlflow.loggedArtifacts", "[]"))
    except (ValueError, RecursionError):
        return frozenset()
    entries = [mapping_of(entry) for entry in listed[:MAX_ENTRIES]] if isinstance(listed, list) else []
    return frozenset(str(entry.get("path")) for entry in entries if entry.get("type") == "table")


def _add_artifact(media: MediaReader, path: Path, tables: frozenset[str]) -> None:
    """Add an artifact: an image of `log_image` at its step, or a table, an image or a text at step 0."""
    name, where = path.with_suffix("").as_posix(), path.as_posix()
    logged = LOGGED_IMAGE.fullmatch(where)
    if logged is not None:
        if logged["small"] is None:
            media.add_file(re.sub("[~#]", "/", logged["key"]), int(logged["step"]), where)
    elif where in tables:
        media.add_table_file(name, 0, where)
    elif path.suffix.lower() in IMAGE_ENDINGS:
        media.add_file(name, 0, where)
    elif path.suffix.lower() in TEXT_ENDINGS:
        media.add_text_file(where, 0, where)
    else:
        media.leave_out("they are artifacts without an image, a text or a table")


def _parts(source: ImportSource, paths: list[Path], notes: list[str]) -> Iterator[ValueTable]:
    metrics, points, broken = [], 0, 0
    for path in paths:
        metric, lines = _metric(path, path.relative_to(source.path / "metrics").as_posix())
        source.done += path.stat().st_size
        points += len(metric.values)
        broken += lines - len(metric.values)
        if points > MAX_SERIES_POINTS:
            raise UnreadableError(f"the run has more than {MAX_SERIES_POINTS:,} points")
        metrics.append(metric)
    names = MetricNames(source.loss)
    yield from tables_of(metrics, names)
    notes += names.notes()
    if broken:
        notes.append(f"{broken:,} lines of metrics were left out: they have no number, time and step.")


def _metric(path: Path, name: str) -> tuple[MetricHistory, int]:
    """The history of a metric, from lines `milliseconds value step`; and the number of lines."""
    data = read_bytes(path, MAX_METRIC_FILE)
    lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    words = data.split()
    if len(words) != 3 * lines:
        # Older or newer lines have fewer or more words.
        parted = [line.split() for line in data.splitlines()]
        words = [word for line in parted if len(line) >= 2 for word in (*line[:2], *(line[2:3] or [b"0"]))]
    try:
        times, values, steps = (np.array(words[i::3], "S64").astype(np.float64) for i in range(3))
        exact = np.array(words[2::3], "S64").astype(np.int64)
    except (ValueError, OverflowError):
        return _slow_metric(words, name), lines
    valid = (steps >= 0) & (steps <= MAX_STEP) & (times / 1e3 >= FIRST_TIME) & (times / 1e3 <= LAST_TIME)
    micros = (times[valid] * 1e3).astype(np.int64)
    return MetricHistory(name, exact[valid], micros, values[valid]), lines


def _slow_metric(words: list[bytes], name: str) -> MetricHistory:
    rows = []
    for at in range(0, len(words) - 2, 3):
        try:
            time_ms, value, step = float(words[at]), float(words[at + 1]), int(words[at + 2])
        except ValueError:
            continue
        if 0 <= step <= MAX_STEP and FIRST_TIME <= time_ms / 1e3 <= LAST_TIME:
            rows.append((step, int(time_ms * 1e3), value))
    steps, times, values = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return MetricHistory(
        name, np.array(steps, np.int64), np.array(times, np.int64), np.array(values, np.float64)
    )


FORMAT = FileFormat(name="mlflow", title="MLflow file store", matches=matches, read=read)
