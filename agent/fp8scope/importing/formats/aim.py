"""Repositories of Aim 3: RocksDB folders with parameters and metrics of each run, and a SQLite file of names.

The folders of the runs are read, not the index that Aim builds of them later: it has no run that was killed.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fp8scope.capture.names import name_in_context
from fp8scope.importing.aim_encoding import (
    END,
    Key,
    NumberColumn,
    decode_path,
    decode_tree,
    decode_value,
    encode_path,
    read_column,
)
from fp8scope.importing.limits import MAX_RUNS, MAX_SCALARS, MAX_SERIES_POINTS
from fp8scope.importing.model import SourceRun, Steps, UnreadableError, Values, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.rocksdb_folder import Item, RocksFolder, open_rocksdb, require_aimrocks
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.sqlite_file import SqliteDatabase, open_database
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

NAMES: Final = "run_metadata.sqlite"
NUMBERS: Final = ("int", "float", "float64", "number")
SYSTEM: Final = "__system__"
EPOCH: Final = "epoch"
MACHINE: Final = ("arguments", "executable", "git_info")
"""Of what Aim notes of the machine; its environment variables have secrets."""


def matches(candidate: SourcePath) -> bool:
    """The folder .aim, or one that has it."""
    return ".aim" in candidate.names or {NAMES, "meta"} <= candidate.names


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """A sequence of a run: its context (by number), name, type, and the layout of its values."""

    context: int
    name: str
    type: str = "float"
    version: int = 1


@dataclass(frozen=True, kw_only=True)
class _Points:
    """The values of a metric, by step; times in microseconds or NO_TIME, epochs NaN where there is none."""

    sequence: _Sequence
    steps: Steps
    values: Values
    times: Steps
    epochs: Values

    @property
    def first_time(self) -> int:
        return int(self.times.min(initial=LAST_TIME * 10**6))


@dataclass(kw_only=True)
class _AimDescription:
    """The row of a run in Aim's database, with its experiment and tags."""

    name: str = ""
    description: str = ""
    experiment: str = ""
    created_at: float | None = None
    finished_at: float | None = None
    tags: list[str] = field(default_factory=list)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the runs of the repository, also those that have not ended."""
    root = source.path / ".aim" if (source.path / ".aim").is_dir() else source.path
    hashes = _hashes(root / "meta" / "chunks", source)
    require_aimrocks(source.path)
    with open_database(root / NAMES) as database:
        described = _descriptions(database)
    failures: list[str] = []
    for identity in hashes:
        try:
            run = _run(source, root, identity, described.get(identity, _AimDescription()), failures)
        except UnreadableError as error:
            failures.append(str(error))
        else:
            yield run
        source.done += 1
    if failures:
        raise UnreadableError(f"{len(failures)} of {len(hashes)} runs are damaged: {failures[0]}")


def _hashes(folder: Path, source: ImportSource) -> list[str]:
    try:
        hashes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError as error:
        raise UnreadableError(f"{source.path} has no runs of Aim: {error.strerror} ({folder})") from None
    if len(hashes) > MAX_RUNS:
        raise UnreadableError(f"{source.path} has more than {MAX_RUNS:,} runs")
    source.total = len(hashes)
    return hashes


def _descriptions(database: SqliteDatabase) -> dict[str, _AimDescription]:
    experiments = _names(database, "experiment")
    tags = _names(database, "tag")
    described: dict[Any, _AimDescription] = {}
    hashes: dict[str, _AimDescription] = {}
    columns = ("id", "hash", "name", "description", "created_at", "finalized_at", "experiment_id")
    for block in database.rows("run", columns):
        for number, identity, name, text, created, finished, experiment in block:
            described[number] = hashes[str(identity)] = _AimDescription(
                name=name if isinstance(name, str) else "",
                description=text if isinstance(text, str) else "",
                experiment=experiments.get(experiment, ""),
                created_at=seconds_of(created),
                finished_at=seconds_of(finished),
            )
    for block in database.rows("run_tag", ("run_id", "tag_id"), order="rowid"):
        for number, tag in block:
            run = described.get(number)
            if run is not None and tag in tags and len(run.tags) < 100:
                run.tags.append(tags[tag])
    return hashes


def _names(database: SqliteDatabase, table: str) -> dict[Any, str]:
    return {number: str(name) for block in database.rows(table, ("id", "name")) for number, name in block}


def _run(
    source: ImportSource, root: Path, identity: str, described: _AimDescription, failures: list[str]
) -> SourceRun:
    """Describe a run. `failures` gets why its metrics cannot be read, which keeps back no other run."""
    below = encode_path("meta", "chunks", identity)
    with open_rocksdb(root / "meta" / "chunks" / identity) as folder:
        parameters = mapping_of(_tree(folder, below + encode_path("attrs")))
        contexts = mapping_of(_tree(folder, below + encode_path("contexts")))
        sequences = _sequences(folder, below + encode_path("traces"))
        ended = [decode_value(value) for _, value in _items(folder, below + encode_path("end_time"))]
    notes: list[str] = []
    # Runs of old versions have it only in the database.
    finished = seconds_of(ended[0]) if ended else described.finished_at
    if finished is None:
        notes.append("The run has not ended: import the repository again later to add what is new.")
    system = mapping_of(parameters.pop("__system_params", None))
    labels = {"experiment": described.experiment, "notes": described.description, **system}
    return SourceRun(
        key=json.dumps(["aim", identity]),
        name=described.name or identity,
        parts=_parts(
            root / "seqs" / "chunks" / identity,
            sequences,
            contexts,
            MetricNames(source.loss),
            notes,
            failures,
        ),
        config=storable(parameters),
        environment={label: storable(value) for label, value in labels.items() if value},
        tags=[tag[:64] for tag in described.tags],
        seed=seed_of(parameters, "hparams"),
        created_at=described.created_at,
        finished_at=finished,
        state="running" if finished is None else "finished",
        notes=notes,
    )


def _items(folder: RocksFolder, prefix: bytes) -> Iterator[Item]:
    return (item for block in folder.blocks(prefix) for item in block)


def _tree(folder: RocksFolder, prefix: bytes) -> Any:
    """The value below a path, without what has secrets or fills a page."""
    machine = prefix + encode_path("__system_params")
    wanted = tuple(machine + encode_path(name) for name in MACHINE)
    items = (
        (key, value)
        for key, value in _items(folder, prefix)
        if key.startswith(wanted) or not key.startswith(machine)
    )
    return decode_tree(items, len(prefix))


def _sequences(folder: RocksFolder, prefix: bytes) -> list[_Sequence]:
    """The sequences of a run, in the order of their contexts and names."""
    facts: dict[tuple[int, str], dict[Key, Any]] = {}
    for key, value in _items(folder, prefix):
        path = decode_path(key[len(prefix) :])
        if len(path) != 3 or not isinstance(path[0], int) or path[2] not in ("dtype", "version"):
            continue
        facts.setdefault((path[0], str(path[1])), {})[path[2]] = decode_value(value)
        if len(facts) > 10 * MAX_SCALARS:
            raise UnreadableError(f"a run has more than {10 * MAX_SCALARS:,} sequences")
    return [
        _Sequence(
            context=context, name=name, type=str(fact.get("dtype", "float")), version=fact.get("version", 1)
        )
        for (context, name), fact in facts.items()
    ]


def _parts(
    path: Path,
    sequences: list[_Sequence],
    contexts: Mapping[Any, Any],
    names: MetricNames,
    notes: list[str],
    failures: list[str],
) -> Iterator[ValueTable]:
    others = Counter(sequence.type for sequence in sequences if sequence.type not in NUMBERS)
    metrics = [sequence for sequence in sequences if sequence.type in NUMBERS]
    try:
        points, left_out = _all_points(path, metrics) if metrics else ([], 0)
        yield from tables_of(_histories(points, contexts), names)
    except UnreadableError as error:
        failures.append(str(error))
        notes.append(f"The metrics were not read: {error}")
        return
    notes += names.notes()
    if left_out:
        notes.append(f"{left_out:,} values were left out: no numbers, or at no whole step from 0.")
    if others:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(others.items()))
        notes.append(f"Sequences that are no numbers were left out: {kinds[:500]}.")


def _all_points(path: Path, metrics: list[_Sequence]) -> tuple[list[_Points], int]:
    """The points of a run's metrics, and how many were left out."""
    points: list[_Points] = []
    left_out, room = 0, MAX_SERIES_POINTS
    with open_rocksdb(path) as folder:
        for sequence in metrics:
            read_points, broken = _points(folder, path.name, sequence, room)
            left_out += broken
            room -= len(read_points.steps)
            points.append(read_points)
    return points, left_out


def _points(folder: RocksFolder, identity: str, sequence: _Sequence, room: int) -> tuple[_Points, int]:
    """The points of a metric, and how many were left out."""
    layout = ("seqs",) if sequence.version == 1 else ("seqs", f"v{sequence.version}")
    below = encode_path(*layout, "chunks", identity, sequence.context, sequence.name)

    def column(name: str) -> NumberColumn:
        path = below + encode_path(name)
        return read_column(folder.blocks(path + END), len(path), room)

    values = column("val")
    # The keys are the steps in the first layout, and hashes of them in the second.
    keys = values.keys.view(np.int64).astype(np.float64)
    steps = keys if sequence.version == 1 else column("step").at(values.keys)
    seconds, epochs = column("time").at(values.keys), column("epoch").at(values.keys)
    valid = values.numbers & (steps >= 0) & (steps <= MAX_STEP) & (np.floor(steps) == steps)
    order = np.flatnonzero(valid)[np.argsort(steps[valid], kind="stable")]
    timed = (seconds >= FIRST_TIME) & (seconds <= LAST_TIME)
    times = np.where(timed, np.round(np.where(timed, seconds, 0.0) * 1e6), NO_TIME).astype(np.int64)
    points = _Points(
        sequence=sequence,
        steps=steps[order].astype(np.int64),
        values=values.values[order],
        times=times[order],
        epochs=epochs[order],
    )
    return points, len(steps) - len(order)


def _histories(metrics: list[_Points], contexts: Mapping[Any, Any]) -> list[MetricHistory]:
    """The metrics in the order in which they began, so that names stay when a run grows."""
    metrics = sorted(
        (points for points in metrics if len(points.steps)),
        key=lambda points: (points.first_time, points.sequence.name, points.sequence.context),
    )
    logged = [points for points in metrics if not points.sequence.name.startswith(SYSTEM)]
    histories: dict[str, MetricHistory] = {}
    for points in metrics:
        context = mapping_of(contexts.get(points.sequence.context))
        name, steps = name_in_context(points.sequence.name, context), points.steps
        if points.sequence.name.startswith(SYSTEM):
            name = f"system/{name_in_context(points.sequence.name.removeprefix(SYSTEM), context)}"
            steps = _current_steps(logged, points)
        if name in histories:
            name = f"{name} {json.dumps(context, sort_keys=True, default=str)}"
        histories[name] = MetricHistory(name, steps, points.times, points.values)
    if EPOCH not in histories and (epochs := _epochs(logged)) is not None:
        histories[EPOCH] = epochs
    return list(histories.values())


def _current_steps(logged: list[_Points], points: _Points) -> Steps:
    """The training's steps at the times of what Aim measured of the machine, which it counts apart."""
    if not logged:
        return points.steps
    times = np.concatenate([other.times for other in logged])
    steps = np.concatenate([other.steps for other in logged])
    order = np.lexsort((steps, times))
    at = np.searchsorted(times[order], points.times, side="right") - 1
    return np.where(at < 0, 0, steps[order][np.maximum(at, 0)])


def _epochs(logged: list[_Points]) -> MetricHistory | None:
    """The epoch of each step, as the first value of the step has it; None if the script gave none."""
    if not logged:
        return None
    steps, times, epochs = (
        np.concatenate([getattr(points, name) for points in logged]) for name in ("steps", "times", "epochs")
    )
    order = np.argsort(times, kind="stable")
    order = order[~np.isnan(epochs[order])]
    if not len(order):
        return None
    chosen = order[np.unique(steps[order], return_index=True)[1]]
    return MetricHistory(EPOCH, steps[chosen], times[chosen], epochs[chosen])


FORMAT = FileFormat(name="aim", title="Aim", matches=matches, read=read)
