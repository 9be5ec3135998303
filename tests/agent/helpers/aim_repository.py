"""Writes repositories as Aim 3.29 does, through aimrocks: Aim itself pins versions that are not the tests'.

Checked by hand with Aim, which reads what this writes to the last value: see docs/importing.md.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aimrocks

Point = tuple[int, float, float | None, float]
"""Step, value, epoch and time of a point."""
Item = tuple[bytes, bytes]
OPTIONS: Mapping[str, Any] = {
    "create_if_missing": True,
    "write_buffer_size": 1 << 20,
    "db_write_buffer_size": 1 << 20,
    "max_write_buffer_number": 1,
    "level0_file_num_compaction_trigger": 8,
    "num_levels": 4,
}
SALTS = {
    "number": -7494597716789683807,
    "list": 2965039128708897743,
    "mapping": -2435585119574290752,
    "text": 7540324813251503183,
}
TABLES = """
CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, hash TEXT, name TEXT, description TEXT,
    is_archived BOOLEAN, created_at DATETIME, updated_at DATETIME, finalized_at DATETIME,
    experiment_id INTEGER);
CREATE TABLE IF NOT EXISTS experiment (id INTEGER PRIMARY KEY, uuid TEXT, name TEXT);
CREATE TABLE IF NOT EXISTS tag (id INTEGER PRIMARY KEY, uuid TEXT, name TEXT);
CREATE TABLE IF NOT EXISTS run_tag (run_id INTEGER, tag_id INTEGER);
"""


class AimObject:
    """An object of Aim's own, such as an image."""


class AimRepository:
    """A repository; `write_run` again with the same hash adds to a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".aim"
        for below in ("meta/chunks", "meta/progress", "seqs/chunks"):
            (self.path / below).mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(self.path / "run_metadata.sqlite")
        self._database.executescript(TABLES)

    def write_run(
        self,
        identity: str,
        *,
        name: str = "",
        experiment: str = "default",
        tags: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        metrics: Sequence[tuple[str, Mapping[str, Any], Sequence[Point]]] = (),
        images: int = 0,
        created_at: float,
        ended_at: float | None,
    ) -> None:
        """Write a run whose values are new; without an end its process is still writing, or was killed."""
        self._describe(identity, name, experiment, tags, created_at)
        meta, series = ("meta", "chunks", identity), ("seqs", "v2", "chunks", identity)
        facts: dict[tuple[Any, ...], Any] = {(*meta, "end_time"): ended_at}
        facts |= {(*meta, "attrs", key): value for key, value in (parameters or {}).items()}
        points: dict[tuple[Any, ...], Any] = {}
        for metric, context, values in metrics:
            number = hash_of(context)
            facts[(*meta, "contexts", number)] = facts["meta", "contexts", number] = dict(context)
            trace, below = (*meta, "traces", number, metric), (*series, number, metric)
            facts[(*trace, "dtype")], facts[(*trace, "version")] = "float", 2
            facts[(*trace, "last_step")] = max(step for step, *_ in values)
            facts[(*meta, "typed_traces", "metric", number, metric)] = 1
            facts["meta", "traces_types", "float", number, metric] = 1
            points |= {(*below, column): [] for column in ("val", "epoch", "time", "step")}
            for step, value, epoch, time in values:
                at = hash_of(step)
                points[(*below, "val", at)], points[(*below, "epoch", at)] = value, epoch
                points[(*below, "time", at)], points[(*below, "step", at)] = time, step
        for step in range(images):
            trace = (*meta, "traces", hash_of({}), "image")
            facts |= {(*trace, "dtype"): "aim.image", (*trace, "version"): 1}
            points["seqs", "chunks", identity, hash_of({}), "image", "val", step] = AimObject()
        _put(self.path / "meta" / "chunks" / identity, facts)
        _put(self.path / "seqs" / "chunks" / identity, points)
        if ended_at is None:
            (self.path / "meta" / "progress" / identity).touch()

    def _describe(
        self, identity: str, name: str, experiment: str, tags: Sequence[str], created_at: float
    ) -> None:
        with self._database as database:
            if database.execute("SELECT 1 FROM run WHERE hash = ?", (identity,)).fetchone():
                return
            created = datetime.fromtimestamp(created_at, UTC).replace(tzinfo=None).isoformat(" ")
            row = (identity, name or f"Run: {identity}", created, self._number("experiment", experiment))
            query = (
                "INSERT INTO run (hash, name, created_at, experiment_id, is_archived) VALUES (?, ?, ?, ?, 0)"
            )
            run = database.execute(query, row).lastrowid
            for tag in tags:
                database.execute("INSERT INTO run_tag VALUES (?, ?)", (run, self._number("tag", tag)))

    def _number(self, table: str, name: str) -> int:
        """The id of an experiment or tag, which is added."""
        row = self._database.execute(f"SELECT id FROM {table} WHERE name = ?", (name,)).fetchone()
        if row is None:
            query = f"INSERT INTO {table} (uuid, name) VALUES (?, ?)"
            return int(self._database.execute(query, (name, name)).lastrowid or 0)
        return int(row[0])


def _put(folder: Path, values: Mapping[tuple[Any, ...], Any]) -> None:
    """Write values as Aim does: of each the old tree is deleted, then the new is put."""
    database = aimrocks.DB(str(folder), aimrocks.Options(**OPTIONS))
    for path, value in values.items():
        batch, begin = aimrocks.WriteBatch(), path_of(*path)
        for domain in (b"", b"BLOBS\xfe"):
            batch.delete_range(domain + begin, domain + begin + b"\xff")
        for key, data in _unfolded(value):
            batch.put(begin + key, data)
            if not data:
                batch.put(b"BLOBS\xfe" + begin + key, b"\x05\x89PNG")
        database.write(batch)
    del database


def change_items(folder: Path, change: Callable[[list[Item]], list[Item]]) -> None:
    """Put what `change` makes of the keys and values of a store."""
    database = aimrocks.DB(str(folder), aimrocks.Options(**OPTIONS))
    iterator = database.iteritems()
    iterator.seek_to_first()
    for key, value in change(list(iterator)):
        database.put(key, value)
    del iterator, database


def path_of(*parts: int | str) -> bytes:
    """The key of a path."""
    encoded = (
        part.encode() if isinstance(part, str) else b"\xfe" + struct.pack(">q", part) for part in parts
    )
    return b"".join(part + b"\xfe" for part in encoded)


def _unfolded(value: Any) -> Iterator[tuple[bytes, bytes]]:
    """The keys below a value's path, with their values."""
    if isinstance(value, AimObject):
        yield b"", b"\x0faim.image"
        yield from ((path_of("width"), _encoded(4)), (path_of("data"), b""))
    elif isinstance(value, Mapping):
        if not value:
            yield b"", b"\x07"
        for key, inner in value.items():
            yield from ((path_of(key) + below, data) for below, data in _unfolded(inner))
    elif isinstance(value, list | tuple):
        yield b"", b"\x06"
        for index, inner in enumerate(value):
            yield from ((path_of(index) + below, data) for below, data in _unfolded(inner))
    else:
        yield b"", _encoded(value)


def _encoded(value: Any) -> bytes:
    if value is None:
        return b"\x00"
    if isinstance(value, bool):
        return bytes((1, value))
    if isinstance(value, int):
        return b"\x02" + struct.pack("<q", value)
    if isinstance(value, float):
        return b"\x03" + struct.pack("<d", value)
    return b"\x04" + str(value).encode()


def hash_of(value: Any) -> int:
    """Aim's hash of a step or context, by which it is filed."""
    if isinstance(value, bool):
        return hash_of(int(value))
    if isinstance(value, int | float):
        # Python's hash of a number, which Aim takes without its exception for -1.
        number = -1 if value == -1 else 0 if math.isnan(value) else hash(value)
        return _digest("number", struct.pack("<q", number))
    if isinstance(value, str):
        return _digest("text", value.encode())
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: hash_of(pair[0]))
        return _digest("mapping", b"".join(struct.pack("<q", hash_of(list(pair))) for pair in pairs))
    return _digest("list", b"".join(struct.pack("<q", hash_of(part)) for part in value))


def _digest(kind: str, data: bytes) -> int:
    salt = struct.pack("<q", SALTS[kind])
    return int.from_bytes(
        hashlib.blake2b(data, digest_size=8, salt=salt).digest(), sys.byteorder, signed=True
    )
