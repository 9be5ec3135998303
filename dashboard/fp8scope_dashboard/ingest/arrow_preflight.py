"""Check the declared sizes of an Arrow IPC stream before decompressing it.

A compressed buffer begins with its decompressed size, and the Arrow reader trusts it: a request of a few
kilobytes could make it allocate gigabytes. So this module adds up the declared sizes first. It reads three
fields of the record batch headers (flatbuffers) and bounds every access.

The layout is that of Message.fbs in the Arrow columnar format and of the flatbuffers internals.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.errors import MalformedError, NotArrowError, TooLargeError

CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\x00\x00\x00\x00"

# A shorter body is read whole.
LONG_BODY = 16_384

# Indices of the fields in their tables.
_MESSAGE_HEADER = 2
_BATCH_LENGTH, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 2, 3
_BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])


@dataclass(frozen=True)
class Envelope:
    """An unread stream: its schema, its record batches, and the sizes that they declare.

    `head`: see `telemetry.models.Chunk`.
    """

    schema: pa.Schema
    batches: list[pa.ipc.Message]
    rows: int
    decompressed_bytes: int
    head: int | None


def open_envelope(body: bytes) -> Envelope:
    """Split a stream into its messages without decompressing them.

    Raises:
        NotArrowError: the bytes are not an Arrow IPC stream.
        MalformedError: the stream is truncated or inconsistent, or has a message of another type.
        TooLargeError: the stream has more rows, record batches or bytes than limits.py allows.
    """
    if not body.startswith(CONTINUATION):
        raise NotArrowError(
            "The body is not an Arrow IPC stream.",
            "Write it with an Arrow stream writer, not a file writer, or send application/json.",
        )
    if not body.endswith(END_OF_STREAM):
        raise MalformedError(
            "The Arrow stream is truncated: its end-of-stream marker is missing.",
            "Close the stream writer before sending, and send the whole buffer.",
        )
    try:
        return _open(body)
    except (pa.ArrowException, struct.error, ValueError, IndexError, OSError) as error:
        raise MalformedError(
            f"The Arrow stream cannot be read: {_brief(error)}",
            "Send the buffer of the writer unchanged.",
        ) from error


def _open(body: bytes) -> Envelope:
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
    first = next(messages, None)
    if first is None or first.type != "schema":
        raise ValueError("it does not begin with a schema")
    if first.metadata.size > limits.SCHEMA_BYTES:
        raise TooLargeError(
            f"The schema has {first.metadata.size} bytes; at most {limits.SCHEMA_BYTES} are allowed.",
            "Log fewer distinct scalars, with shorter names.",
        )
    schema = pa.ipc.read_schema(first)
    batches: list[pa.ipc.Message] = []
    rows = size = 0
    position = _encoded_size(first)
    head: int | None = None
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"a {message.type} is not allowed in a batch")
        batches.append(message)
        batch_rows, batch_size = _declared_size(message)
        rows, size = rows + batch_rows, size + batch_size
        _check(len(batches), rows, size)
        head = _head(message, schema, position)
        position += _encoded_size(message)
    if position + len(END_OF_STREAM) != len(body):
        raise ValueError("bytes follow the end of the stream")
    return Envelope(schema=schema, batches=batches, rows=rows, decompressed_bytes=size, head=head)


def _head(message: pa.ipc.Message, schema: pa.Schema, position: int) -> int | None:
    """The bytes of the stream up to the last buffer of a record batch that no tensor has.

    None for a short body, if most bytes are head, or if the columns do not have the types of a batch, which
    is refused later.

    Args:
        position: that of the message in the stream.
    """
    size = message.body.size if message.body else 0
    lists = [pa.types.is_fixed_size_list(column.type) for column in schema]
    if size < LONG_BODY or not any(lists):
        return None
    # A list has a validity buffer, and its values have two; a number has two.
    per_column = np.where(lists, 3, 2)
    table = _FlatTable.root(memoryview(message.metadata)).child(_MESSAGE_HEADER)
    buffers = table.vector(_BATCH_BUFFERS, _BUFFER)
    if int(per_column.sum()) != len(buffers):
        return None
    of_head = ~np.repeat(lists, per_column)
    last = int((buffers["offset"] + buffers["length"])[of_head].max(initial=0))
    end = position + _encoded_size(message)
    head = end - size + last
    return head if 2 * head < end else None


def _encoded_size(message: pa.ipc.Message) -> int:
    """Bytes of a message in the stream: a prefix of 8, the header and the buffers."""
    buffers = message.body
    return len(CONTINUATION) + 4 + message.metadata.size + (buffers.size if buffers else 0)


def _check(batches: int, rows: int, size: int) -> None:
    hint = "Split it into several batches."
    if rows > limits.ROWS:
        raise TooLargeError(f"The batch has more than {limits.ROWS} rows.", hint)
    if batches > limits.RECORD_BATCHES:
        raise TooLargeError(f"The batch has more than {limits.RECORD_BATCHES} record batches.", hint)
    if size > limits.DECOMPRESSED_BYTES:
        raise TooLargeError(f"The batch decompresses to more than {limits.DECOMPRESSED_BYTES} bytes.", hint)


def _declared_size(message: pa.ipc.Message) -> tuple[int, int]:
    """Rows and decompressed bytes that a record batch declares."""
    table = _FlatTable.root(memoryview(message.metadata)).child(_MESSAGE_HEADER)
    rows = table.int64(_BATCH_LENGTH)
    if rows < 0:
        raise ValueError("a record batch has a negative length")
    buffers = table.vector(_BATCH_BUFFERS, _BUFFER)
    body = np.frombuffer(memoryview(message.body or b""), np.uint8)
    offsets, lengths = buffers["offset"], buffers["length"]
    if (offsets < 0).any() or (lengths < 0).any() or (offsets > len(body) - lengths).any():
        raise ValueError("a buffer lies outside its record batch")
    if not table.has(_BATCH_COMPRESSION):
        return rows, int(lengths.sum())
    offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if (lengths < 8).any():
        raise ValueError("a compressed buffer is too short to hold its size")
    sizes = body[offsets[:, None] + np.arange(8)].view("<i8")[:, 0] if len(offsets) else offsets
    # -1 means that the buffer is not compressed.
    sizes = np.where(sizes == -1, lengths - 8, sizes)
    if (sizes < 0).any():
        raise ValueError("a compressed buffer has a negative size")
    return rows, sum(sizes.tolist())


class _FlatTable:
    """A flatbuffers table. Its vtable holds the offset of each field."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - self._read("<i", position)
        self._vtable_size = self._read("<H", self._vtable)

    @classmethod
    def root(cls, data: memoryview) -> _FlatTable:
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, field: int) -> bool:
        return self._field_position(field) is not None

    def int64(self, field: int) -> int:
        position = self._field_position(field)
        return 0 if position is None else self._read("<q", position)

    def child(self, field: int) -> _FlatTable:
        return _FlatTable(self._data, self._target(field))

    def vector(self, field: int, dtype: np.dtype[np.void]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        if not self.has(field):
            return np.zeros(0, dtype)
        start = self._target(field)
        return np.frombuffer(self._data, dtype, count=self._read("<I", start), offset=start + 4)

    def _target(self, field: int) -> int:
        position = self._field_position(field)
        if position is None:
            raise ValueError("a header lacks a field")
        return position + self._read("<I", position)

    def _field_position(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._vtable_size:
            return None
        offset = self._read("<H", self._vtable + slot)
        return self._position + offset if offset else None

    def _read(self, form: str, position: int) -> int:
        if position < 0:
            raise ValueError("a header points outside itself")
        return int(struct.unpack_from(form, self._data, position)[0])


def _brief(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
