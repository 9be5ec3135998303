"""Offline runs of W&B: `run-<id>.wandb`, a log of protocol buffers (wandb/proto/wandb_internal.proto)."""

import json
import math
from collections.abc import Iterator
from typing import Any, Final

from fp8scope.binary.protobuf import signed
from fp8scope.importing.binary import TornError, fields, log_records, varint
from fp8scope.importing.limits import MAX_ENTRIES
from fp8scope.importing.media import MAX_WAITING, MediaReader
from fp8scope.importing.model import SourceMedia, SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import RowTables
from fp8scope.importing.values import (
    FIRST_TIME,
    LAST_TIME,
    MAX_STEP,
    flat_numbers,
    mapping_of,
    number_of,
    seed_of,
    storable,
)

MAGIC: Final = b":W&B\xe1\xbe\x00"
HISTORY, SUMMARY, CONFIG, STATS, RUN, EXIT = 2, 3, 5, 7, 17, 18
ITEM: Final = 0x0A
VALUE: Final = b"\x82\x01"
"""The tag of `value_json`, which ends an item."""
TYPE: Final = "._type"
INTERNAL: Final = ("_step", "_timestamp", "_runtime", "_wandb")
MAX_PREFIXES: Final = 100_000


def matches(candidate: SourcePath) -> bool:
    """The header of the log."""
    return candidate.head.startswith(MAGIC)


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run. Values in the file are sent as they are read."""
    source.total = source.path.stat().st_size
    records = _records(source)
    for record in records:
        described = _field(record, RUN)
        if described is not None:
            run = _run_of(described)
            run.parts = _parts(source, run, records)
            yield run
            return
    raise UnreadableError(
        f"{source.path} has no description of a run: was its process killed while it began?"
    )


def _records(source: ImportSource) -> Iterator[bytes]:
    """The records up to the end, or to where the process was killed."""
    with source.path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UnreadableError(f"{source.path} is no offline run of W&B")
        try:
            for record in log_records(file, len(MAGIC)):
                source.done += len(record)
                yield record
        except TornError:
            source.notes.append(
                "The file ends inside of a record, which was left out: its process was killed."
            )


def _field(record: bytes, number: int) -> bytes | None:
    for at, value in fields(record):
        if at == number and isinstance(value, bytes):
            return value
    return None


def _run_of(data: bytes) -> SourceRun:
    texts: dict[int, str] = {}
    tags: list[str] = []
    config: dict[str, Any] = {}
    created_at = None
    for number, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 4:
            _update(config, value)
        elif number == 10:
            tags.append(_text(value))
        elif number == 17:
            created_at = _timestamp(value)
        elif number in (1, 2, 3, 6, 7, 8, 9, 13):
            texts[number] = _text(value)
    identity = [texts.get(number, "") for number in (2, 3, 1)]
    return SourceRun(
        key=json.dumps(identity),
        name=texts.get(8) or texts.get(1, "") or "run",
        parts=iter(()),
        config=config,
        environment={label: text for label, number in _LABELS if (text := texts.get(number, ""))},
        tags=tags[:100],
        group=texts.get(6, ""),
        seed=seed_of(config),
        created_at=created_at,
        state="running",
    )


_LABELS: Final = (
    ("entity", 2),
    ("project", 3),
    ("run_id", 1),
    ("job_type", 7),
    ("hostname", 13),
    ("notes", 9),
)


def _parts(
    source: ImportSource, run: SourceRun, records: Iterator[bytes]
) -> Iterator[ValueTable | SourceMedia]:
    names = MetricNames(source.loss)
    media = MediaReader(source.path.parent / "files")
    history = _History(RowTables(names), media)
    for record in records:
        for number, value in fields(record):
            if not isinstance(value, bytes):
                continue
            if number == HISTORY:
                history.add(value)
            elif number == STATS:
                history.add_stats(value)
            elif number == CONFIG:
                _update(run.config, value)
            elif number == SUMMARY:
                _update(run.summary, value)
            elif number == EXIT:
                code = next((item for at, item in fields(value) if at == 1), 0)
                run.state = "failed" if code else "finished"
                run.failure = f"The script ended with the exit code {code!r}." if code else ""
            elif number == RUN:
                run.config.update(_run_of(value).config)
        yield from media.take()
        if history.rows.is_full:
            yield from history.rows.take()
    yield from history.rows.take()
    recorded = history.names
    run.summary = {key: value for key, value in run.summary.items() if key not in recorded and key[:1] != "_"}
    if run.state == "running":
        run.notes.append("The run has not ended: import the file again later to add what is new.")
    run.notes += source.notes + names.notes() + media.notes()


class _History:
    """Rows from history records.

    The items of a key begin with the same bytes in every record: only the value that follows is parsed.
    """

    def __init__(self, rows: RowTables, media: MediaReader) -> None:
        self.rows = rows
        self._media = media
        self._keys: dict[bytes, str] = {}
        self._step = 0

    @property
    def names(self) -> frozenset[str]:
        """The keys that were recorded."""
        return frozenset(self._keys.values())

    def add(self, data: bytes) -> None:
        """Add a row."""
        time_us: int | None = None
        values: list[tuple[str, float]] = []
        objects: dict[str, dict[str, Any]] = {}
        items, step = self._items(data)
        for key, text in items:
            try:
                number: float | None = float(text)
            except ValueError:
                number = _number(text)
            if key[:1] == "_" and key in INTERNAL:
                if key == "_step" and number is not None and step is None and math.isfinite(number):
                    step = int(number)
                elif key == "_timestamp" and number is not None and FIRST_TIME <= number <= LAST_TIME:
                    time_us = round(number * 1e6)
            elif number is not None:
                values.append((key, number))
            elif text[:1] == b"{":
                value = _mapping(text)
                if "_type" in value:
                    objects[key] = value
                else:
                    values += ((f"{key}.{name}", number) for name, number in flat_numbers(value, "."))
            elif key.endswith(TYPE):
                # Newer versions write the entries of an object as items.
                objects[key.removesuffix(TYPE)] = {}
        if step is not None and 0 <= step <= MAX_STEP:
            self._step = step
        if objects:
            values = [value for value in values if value[0].rpartition(".")[0] not in objects]
            for entry, text in items:
                name, _, field = entry.rpartition(".")
                if name in objects:
                    objects[name].setdefault(field, text)
            for name, value in objects.items():
                _add_media(self._media, name, self._step, value)
        self.rows.add(self._step, time_us, values)

    def _items(self, data: bytes) -> tuple[list[tuple[str, bytes]], int | None]:
        """The items of a history record as their keys and JSON, and its step.

        This runs for each value, so it reads the usual form of an item where it is.
        """
        items: list[tuple[str, bytes]] = []
        at, end, keys = 0, len(data), self._keys
        while at < end and data[at] == ITEM:
            begin = at + 2
            length = data[at + 1] if begin <= end else 128
            if length > 127:
                length, begin = varint(data, at + 1)
            at = begin + length
            if at > end:
                raise UnreadableError("a message ends inside of a field")
            split = data.find(VALUE, begin, at)
            key = keys.get(data[begin:split]) if split > 0 else None
            # The length of the JSON is one byte, and then it ends the item.
            if key is not None and split + 3 <= at and data[split + 2] == at - split - 3 < 128:
                items.append((key, data[split + 3 : at]))
            else:
                items.append(self._item(data[begin:at]))
        step = None
        for number, value in fields(data[at:]):
            if number == 1 and isinstance(value, bytes):
                items.append(self._item(value))
            elif number == 2 and isinstance(value, bytes):
                step = next((signed(n) for i, n in fields(value) if i == 1 and isinstance(n, int)), 0)
        return items, step

    def add_stats(self, data: bytes) -> None:
        """Add what W&B measured of the machine, at the latest step."""
        time_us: int | None = None
        values: list[tuple[str, float]] = []
        for number, item in fields(data):
            if number == 2 and isinstance(item, bytes):
                seconds = _timestamp(item)
                time_us = None if seconds is None else round(seconds * 1e6)
            elif number == 3 and isinstance(item, bytes):
                key, text = self._item(item)
                value = _number(text)
                if value is not None:
                    values.append((f"system/{key}", value))
        if values:
            self.rows.add(self._step, time_us, values)

    def _item(self, item: bytes) -> tuple[str, bytes]:
        """The key and the JSON of an item."""
        at = item.find(VALUE)
        key = self._keys.get(item[:at]) if at > 0 else None
        if key is not None:
            length, begin = varint(item, at + 2)
            if begin + length == len(item):
                return key, item[begin:]
        key, text = _key_and_json(item)
        prefix = item[: len(item) - len(text)]
        at = prefix.rfind(VALUE)
        if at > 0 and prefix.find(VALUE) == at and len(self._keys) < MAX_PREFIXES:
            self._keys[prefix[:at]] = key
        return key, text


def _key_and_json(item: bytes) -> tuple[str, bytes]:
    """The key of an item, nested ones joined by a dot, and its JSON."""
    nested: list[str] = []
    key, text = "", b""
    for number, value in fields(item):
        if isinstance(value, bytes):
            if number == 1:
                key = _text(value)
            elif number == 2:
                nested.append(_text(value))
            elif number == 16:
                text = value
    return key or ".".join(nested), text


def _update(target: dict[str, Any], data: bytes) -> None:
    """Apply the changes of a configuration or summary record to a mapping."""
    for number, item in fields(data):
        if number not in (1, 2) or not isinstance(item, bytes):
            continue
        key, text = _key_and_json(item)
        if number == 2:
            target.pop(key, None)
        elif key not in INTERNAL and (key in target or len(target) < MAX_ENTRIES):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                continue
            target[key] = storable(value)


def _mapping(text: bytes) -> dict[str, Any]:
    """A JSON object; an empty one if it is none."""
    try:
        return mapping_of(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _add_media(media: MediaReader, name: str, step: int, entries: dict[str, Any]) -> None:
    """Add an object of W&B, which says its `_type`, and where its files are."""
    value = {entry: _plain(part) if isinstance(part, bytes) else part for entry, part in entries.items()}
    kind = str(value.get("_type", ""))[:40]
    if kind == "images/separated":
        files, captions = value.get("filenames"), value.get("captions")
        for at, where in enumerate(files[:MAX_WAITING] if isinstance(files, list) else ()):
            own = captions[at] if isinstance(captions, list) and at < len(captions) else ""
            media.add_file(name, step, where, caption=own)
    elif kind == "table-file":
        media.add_table_file(name, step, value.get("path"))
    elif kind.endswith("-file"):
        media.add_file(name, step, value.get("path"), caption=value.get("caption"))
    elif isinstance(several := value.get(kind), list):
        for part in several[:MAX_WAITING]:
            media.add_file(name, step, mapping_of(part).get("path"), caption=mapping_of(part).get("caption"))
    else:
        media.leave_out(f"their type {kind!r} has no kind here")


def _plain(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    if text in (b"true", b"false"):
        return float(text == b"true")
    return number_of(text[1:-1].decode("utf-8", "replace")) if text[:1] == b'"' and len(text) < 12 else None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "")[:1_000]


def _timestamp(data: bytes) -> float | None:
    """A google.protobuf.Timestamp as seconds since 1970."""
    parts = {number: value for number, value in fields(data) if isinstance(value, int)}
    seconds = signed(parts.get(1, 0)) + parts.get(2, 0) / 1e9
    return seconds if FIRST_TIME <= seconds <= LAST_TIME else None


FORMAT = FileFormat(name="wandb", title="W&B offline runs", matches=matches, read=read)
