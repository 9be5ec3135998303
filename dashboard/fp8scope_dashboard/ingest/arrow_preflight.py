"""What an Arrow IPC stream says about itself, read before anything is decompressed.

A compressed buffer begins with the number of bytes that it decompresses to, and Arrow's reader believes it:
a request of a few kilobytes could have it allocate gigabytes. So the sizes are added up first. For this the
record batch headers (flatbuffers) are read here: only three fields of them, every access bounded.

Layout: the Arrow columnar format's Message.fbs and the flatbuffers' internals, both as published.
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

# Positions of the fields in their tables.
_MESSAGE_HEADER = 2
_BATCH_LENGTH, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 2, 3
_BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])


@dataclass(frozen=True)
class Envelope:
    """An unread stream: its schema, its record batches, and what they claim to hold."""

    schema: pa.Schema
    batches: list[pa.ipc.Message]
    rows: int
    decompressed_bytes: int


def open_envelope(body: bytes) -> Envelope:
    """Take a stream apart without decompressing.

    Raises:
        NotArrowError: these are not the bytes of an Arrow IPC stream.
        MalformedError: truncated or inconsistent, or it holds messages that do not belong in a batch.
        TooLargeError: more rows, record batches or bytes than limits.py allows.
    """
    if not body.startswith(CONTINUATION):
        raise NotArrowError(
            "The body is not an Arrow IPC stream.",
            "Write it with an Arrow stream writer (not a file writer), or send application/json.",
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
            "Send the writer's buffer as it is, unchanged.",
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
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"a {message.type} does not belong in a batch")
        batches.append(message)
        batch_rows, batch_size = _claims(message)
        rows, size = rows + batch_rows, size + batch_size
        _check(len(batches), rows, size)
    if sum(map(_length, [first, *batches])) + len(END_OF_STREAM) != len(body):
        raise ValueError("it ends before its last byte")
    return Envelope(schema, batches, rows, size)


def _length(message: pa.ipc.Message) -> int:
    """Bytes that a message takes in the stream: a prefix of 8, the header and the buffers."""
    buffers = message.body
    return len(CONTINUATION) + 4 + message.metadata.size + (buffers.size if buffers else 0)


def _check(batches: int, rows: int, size: int) -> None:
    hint = "Send it in several batches."
    if rows > limits.ROWS:
        raise TooLargeError(f"The batch has more than {limits.ROWS} rows.", hint)
    if batches > limits.RECORD_BATCHES:
        raise TooLargeError(f"The batch has more than {limits.RECORD_BATCHES} record batches.", hint)
    if size > limits.DECOMPRESSED_BYTES:
        raise TooLargeError(f"The batch decompresses to more than {limits.DECOMPRESSED_BYTES} bytes.", hint)


def _claims(message: pa.ipc.Message) -> tuple[int, int]:
    """How many rows a record batch says it has, and how many bytes its buffers say they decompress to."""
    table = _Table.root(memoryview(message.metadata)).child(_MESSAGE_HEADER)
    rows = table.int64(_BATCH_LENGTH)
    if rows < 0:
        raise ValueError("a record batch has a negative length")
    buffers = table.vector(_BATCH_BUFFERS, _BUFFER)
    body = np.frombuffer(memoryview(message.body or b""), np.uint8)
    offsets, lengths = buffers["offset"], buffers["length"]
    if (offsets < 0).any() or (lengths < 0).any() or (offsets > len(body) - lengths).any():
        raise ValueError("a buffer lies outside of its record batch")
    if not table.has(_BATCH_COMPRESSION):
        return rows, int(lengths.sum())
    offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if (lengths < 8).any():
        raise ValueError("a compressed buffer is too short to say its size")
    claimed = body[offsets[:, None] + np.arange(8)].view("<i8")[:, 0] if len(offsets) else offsets
    # -1 says: not compressed after all.
    claimed = np.where(claimed == -1, lengths - 8, claimed)
    if (claimed < 0).any():
        raise ValueError("a compressed buffer has a negative size")
    return rows, sum(claimed.tolist())


class _Table:
    """A flatbuffers table: a position from which a vtable says where the fields are."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - self._read("<i", position)
        self._vtable_size = self._read("<H", self._vtable)

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, field: int) -> bool:
        return self._place(field) is not None

    def int64(self, field: int) -> int:
        place = self._place(field)
        return 0 if place is None else self._read("<q", place)

    def child(self, field: int) -> _Table:
        return _Table(self._data, self._target(field))

    def vector(self, field: int, dtype: np.dtype[np.void]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        if not self.has(field):
            return np.zeros(0, dtype)
        start = self._target(field)
        return np.frombuffer(self._data, dtype, count=self._read("<I", start), offset=start + 4)

    def _target(self, field: int) -> int:
        place = self._place(field)
        if place is None:
            raise ValueError("a header lacks a field")
        return place + self._read("<I", place)

    def _place(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._vtable_size:
            return None
        offset = self._read("<H", self._vtable + slot)
        return self._position + offset if offset else None

    def _read(self, form: str, position: int) -> int:
        if position < 0:
            raise ValueError("a header points outside of itself")
        return int(struct.unpack_from(form, self._data, position)[0])


def _brief(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
