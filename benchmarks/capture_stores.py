"""Reads back what a tracker has stored of a script, from its own files."""

import csv
import json
import math
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8scope.capture.values import flattened
from fp8scope.recording.records import RecordKind, Row
from fp8scope.recording.spool import Spool, find_spools

BLOCK = 32_768
"""Bytes of a block of a `.wandb` file, which has the form of LevelDB's logs."""


class Stored(NamedTuple):
    """A value that a tracker has stored. `single`: in single precision."""

    tracker: str
    name: str
    step: int
    value: float
    single: bool = False


def tensorboard(folder: Path) -> Iterator[Stored]:
    """Scalars in event files, also those of `add_scalars`, which have folders of their own."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value if event.HasField("summary") else ():
                if value.metadata.plugin_data.plugin_name != "scalars":
                    continue
                yield Stored("tensorboard", _scalars_name(value.tag, path), event.step, _number(value), True)


def _number(value: Any) -> float:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    from tensorboard.util import tensor_util

    return float(tensor_util.make_ndarray(value.tensor).item())


def _scalars_name(tag: str, path: Path) -> str:
    """`add_scalars("a", {"b": 1})` writes the tag "a" into a folder `..._b` or `.../a/b`."""
    torchs, tensorboardx = f"{tag.replace('/', '_')}_", f"/{tag}/"
    for part in path.parent.parts[-2:]:
        if part.startswith(torchs):
            return f"{tag}/{part.removeprefix(torchs)}"
    return (
        f"{tag}/{path.parent.name}" if tensorboardx in f"{path.parent}/" and path.parent.name != tag else tag
    )


def wandb(folder: Path) -> Iterator[Stored]:
    """The history in the files of offline runs."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for path in sorted(folder.rglob("*.wandb")):
        for data in _leveldb(path.read_bytes()[7:], offset=7):
            record = messages.Record.FromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {
                tuple(item.nested_key) or (item.key,): json.loads(item.value_json)
                for item in record.history.item
            }
            step = int(items.get(("_step",), record.history.step.num))
            for names, value in items.items():
                for name, number in _numbers({".".join(names): value}, "."):
                    if not name.startswith("_"):
                        yield Stored("wandb", name, step, number)


def _leveldb(data: bytes, *, offset: int) -> Iterator[bytes]:
    """The records of a LevelDB log whose first `offset` bytes are left out."""
    at, whole = 0, b""
    while at + 7 <= len(data):
        left = BLOCK - (at + offset) % BLOCK
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def _numbers(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, float]]:
    for name, value in flattened(values, separator):
        if isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
            yield name, float(value)


def mlflow(folder: Path) -> Iterator[Stored]:
    """The metrics in a SQLite store."""
    for path in sorted(folder.rglob("mlflow.db")):
        with sqlite3.connect(path) as database:
            for key, value, step, is_nan in database.execute("select key, value, step, is_nan from metrics"):
                yield Stored("mlflow", key, step, math.nan if is_nan else value)


def trackio(folder: Path) -> Iterator[Stored]:
    """The metrics in Trackio's databases."""
    for path in sorted(folder.rglob("trackio/*.db")):
        with sqlite3.connect(path) as database:
            for step, metrics in database.execute("select step, metrics from metrics"):
                for name, number in _numbers(json.loads(metrics), "."):
                    yield Stored("trackio", name, step, number)


def csv_logger(folder: Path) -> Iterator[Stored]:
    """The file of Lightning's CSVLogger."""
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open() as lines:
            for row in csv.DictReader(lines):
                for name, text in row.items():
                    if name != "step" and text:
                        yield Stored("lightning", name, int(row["step"]), float(text))


def logged(folder: Path) -> Iterator[Stored]:
    """The values that a script has written down itself, from another logger of its framework."""
    for path in sorted(folder.glob("logged.jsonl")):
        for line in path.read_text().splitlines():
            tracker, name, step, value = json.loads(line)
            yield Stored(tracker, name, step, value)


def lightning(folder: Path) -> Iterator[Stored]:
    """The file of Lightning's CSVLogger, and what a script has written down of Fabric."""
    yield from csv_logger(folder)
    yield from logged(folder)


READERS: Mapping[str, Callable[[Path], Iterator[Stored]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
    "lightning": lightning,
    **dict.fromkeys(("composer", "deepspeed", "ray", "torchtune", "verl"), logged),
}


def recorded(directory: Path) -> list[Row]:
    """The rows of all runs that were recorded below a directory."""
    rows = []
    for path in find_spools(directory):
        spool, at = Spool(path), 0
        while (record := spool.read(at)) is not None:
            if record.kind is RecordKind.ROW:
                rows.append(Row.decode(record.payload))
            at = record.end
        spool.close()
    return rows


def key(value: float, *, single: bool) -> float | str:
    """What tells whether two values are equal, in the precision that the tracker stores."""
    if math.isnan(value):
        return "nan"
    if not single:
        return value
    with np.errstate(over="ignore"):
        return float(np.float32(value))
