"""Writes one record batch as an Arrow IPC stream, from NumPy's memory.

Written by us because of what a training machine would install else: pyarrow is 40 MB to download and 170 MB
on disk, and its import fails beside a NumPy that it does not support, which pip does not prevent.

The layout is that of Schema.fbs and Message.fbs in the Arrow columnar format, and of the flatbuffers
internals. A flatbuffer is written from its root on, so that each offset points forward, as the format says.
The same values give the same bytes.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

try:
    from compression import zstd  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    try:
        from backports import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        # Buffers are then sent as they are.
        zstd = None

ColumnType = Literal["int32", "int64", "float64", "time"]

CONTINUATION: Final = b"\xff\xff\xff\xff"
END_OF_STREAM: Final = CONTINUATION + bytes(4)
VERSION_5: Final = 4
SCHEMA, RECORD_BATCH = 1, 3
INT, FLOATING_POINT, TIMESTAMP, FIXED_SIZE_LIST = 2, 3, 10, 16
DOUBLE, MICROSECOND, ZSTD = 2, 2, 1
LEVEL = 1


@dataclass(frozen=True, kw_only=True)
class ArrowColumn:
    """A column of `values`: [rows], or [rows, size] for a list of fixed size per row.

    The dtype of `values` is that of `type`: int32, int64 or float64; "time" is int64, microseconds since 1970
    (UTC).
    `missing`: bool of the same shape, True for null; None for a column that declares that it has no nulls.
    """

    name: str
    type: ColumnType
    values: NDArray[Any]
    missing: NDArray[np.bool_] | None = None
    nullable: bool = True


def write_stream(columns: Sequence[ArrowColumn], metadata: Mapping[str, str]) -> bytes:
    """Return the stream: a schema with this metadata, one record batch, and the end."""
    body = _Buffers()
    for column in columns:
        body.add(column)
    fields = [_field(column) for column in columns]
    schema = _FieldTable(None, _Vector(fields), _Vector([_FieldTable(*pair) for pair in metadata.items()]))
    compression = None if zstd is None else _FieldTable(_Number("b", ZSTD), None)
    batch = _FieldTable(
        _Number("q", len(columns[0].values)), _Pairs(body.nodes), _Pairs(body.buffers), compression
    )
    data = b"".join(body.parts)
    return _message(SCHEMA, schema, b"") + _message(RECORD_BATCH, batch, data) + END_OF_STREAM


def can_compress() -> bool:
    """Return whether zstd is there."""
    return zstd is not None


class _Buffers:
    """The buffers of a record batch, one after the other, and where they are."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.nodes: list[tuple[int, int]] = []
        """Length and number of nulls of each array."""
        self.buffers: list[tuple[int, int]] = []
        """Offset and length of each buffer."""
        self._end = 0

    def add(self, column: ArrowColumn) -> None:
        """Add the buffers of a column: validity and values, after the validity of the list if it is one."""
        values, missing = column.values, column.missing
        if values.ndim == 2:
            self.nodes.append((len(values), 0))
            self._append(b"")
        nulls = 0 if missing is None else int(np.count_nonzero(missing))
        self.nodes.append((values.size, nulls))
        validity = b""
        if missing is not None and nulls:
            validity = np.packbits(~missing.reshape(-1), bitorder="little").tobytes()
        self._append(validity)
        self._append(values.tobytes())

    def _append(self, data: bytes) -> None:
        if data and zstd is not None:
            data = struct.pack("<q", len(data)) + zstd.compress(data, LEVEL)
        self.buffers.append((self._end, len(data)))
        padded = data + bytes(-len(data) % 8)
        self.parts.append(padded)
        self._end += len(padded)


# Flatbuffers


@dataclass(frozen=True, slots=True)
class _Number:
    """A number in a table, with its format in `struct`."""

    format: str
    value: int


@dataclass(frozen=True, slots=True)
class _Pairs:
    """A vector of structs of two int64."""

    items: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Vector:
    """A vector of tables."""

    items: "Sequence[_FieldTable]"


class _FieldTable:
    """A table by the numbers of its fields; None for a field that has its default."""

    __slots__ = ("fields",)

    def __init__(self, *fields: "_Number | _Pairs | _Vector | _FieldTable | str | None") -> None:
        self.fields = fields


def _field(column: ArrowColumn) -> _FieldTable:
    item = {
        "int32": (INT, _FieldTable(_Number("i", 32), _Number("b", 1))),
        "int64": (INT, _FieldTable(_Number("i", 64), _Number("b", 1))),
        "float64": (FLOATING_POINT, _FieldTable(_Number("h", DOUBLE))),
        "time": (TIMESTAMP, _FieldTable(_Number("h", MICROSECOND), "UTC")),
    }[column.type]
    if column.values.ndim == 1:
        return _typed(column.name, column.nullable, *item)
    size = _FieldTable(_Number("i", column.values.shape[1]))
    return _typed(column.name, column.nullable, FIXED_SIZE_LIST, size, _typed("item", True, *item))


def _typed(name: str, nullable: bool, number: int, type: _FieldTable, *children: _FieldTable) -> _FieldTable:
    # By the numbers of the schema: name, nullable, type's number, type, dictionary, children.
    fields = (name, _Number("b", nullable), _Number("B", number), type, None, _Vector(children))
    return _FieldTable(*fields)


def _message(kind: int, header: _FieldTable, body: bytes) -> bytes:
    out = bytearray(4)
    root = _FieldTable(_Number("h", VERSION_5), _Number("B", kind), header, _Number("q", len(body)))
    struct.pack_into("<I", out, 0, _write(out, root))
    out += bytes(-len(out) % 8)
    return CONTINUATION + struct.pack("<i", len(out)) + bytes(out) + body


def _write(out: bytearray, node: "_Pairs | _Vector | _FieldTable | str") -> int:
    """Append an object with all that it refers to; returns its position."""
    if isinstance(node, _FieldTable):
        return _write_table(out, node)
    out += bytes(-len(out) % 4)
    if isinstance(node, str):
        at, text = len(out), node.encode()
        out += struct.pack("<I", len(text)) + text + b"\0"
        return at
    if isinstance(node, _Pairs):
        # The structs, which follow the vector's length, are aligned to 8 bytes.
        out += bytes((4 - len(out)) % 8)
        at = len(out)
        out += struct.pack("<I", len(node.items)) + np.array(node.items, "<i8").tobytes()
        return at
    at = len(out)
    out += struct.pack("<I", len(node.items)) + bytes(4 * len(node.items))
    for index, item in enumerate(node.items):
        _point(out, at + 4 + 4 * index, item)
    return at


def _write_table(out: bytearray, table: _FieldTable) -> int:
    """Append the vtable, then the table with its widest fields first, then what it refers to."""
    sizes = {
        index: struct.calcsize(field.format) if isinstance(field, _Number) else 4
        for index, field in enumerate(table.fields)
        if field is not None
    }
    order = sorted(sizes, key=lambda index: -sizes[index])
    offsets, end = {}, 4
    for index in order:
        offsets[index] = end
        end += sizes[index]
    slots = len(table.fields)
    vtable = struct.pack(f"<{2 + slots}H", 4 + 2 * slots, end, *(offsets.get(i, 0) for i in range(slots)))
    # The first field is aligned to 8 bytes, and the table begins 4 before it.
    out += bytes((4 - len(out) - len(vtable)) % 8)
    out += vtable
    at = len(out)
    out += struct.pack("<i", len(vtable)) + bytes(end - 4)
    for index in order:
        field = table.fields[index]
        if isinstance(field, _Number):
            struct.pack_into("<" + field.format, out, at + offsets[index], field.value)
        elif field is not None:
            _point(out, at + offsets[index], field)
    return at


def _point(out: bytearray, at: int, node: "_Pairs | _Vector | _FieldTable | str") -> None:
    struct.pack_into("<I", out, at, _write(out, node) - at)
