"""Records of TensorBoard's event files: length, content, and a masked CRC-32C of each.

All events of a series have the same bytes but for time, step and value, so that they are made as a matrix,
and their checksums byte by byte for all of them at once.
"""

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.binary.crc32c import masked_crcs
from fp8scope.binary.encoding import field_bytes, field_number, field_text, varint
from fp8scope.client.history import Steps, Values
from fp8scope.exporting.tensorboard.messages import DT_FLOAT, SCALAR_CLASS, metadata

Bytes = NDArray[np.uint8]
Checksums = NDArray[np.uint32]
EVENTS_AT_ONCE: Final = 100_000


def masked_checksums(rows: Bytes) -> Checksums:
    """uint32[N]: the masked CRC-32C of each row of uint8[N, L]."""
    count, length = rows.shape
    starts = np.arange(count, dtype=np.int64) * length
    return masked_crcs(np.ascontiguousarray(rows).reshape(-1), starts, np.full(count, length, np.int64))


def record(content: bytes) -> bytes:
    """One record."""
    return records(np.frombuffer(content, np.uint8).reshape(1, -1))


def records(rows: Bytes) -> bytes:
    """Records with the rows of uint8[N, L] as contents."""
    count, length = rows.shape
    head = np.frombuffer(struct.pack("<Q", length), np.uint8)
    head_sum = masked_checksums(head.reshape(1, -1)).view(np.uint8)
    sums = masked_checksums(rows).reshape(-1, 1).view(np.uint8)
    start = np.broadcast_to(np.concatenate([head, head_sum]), (count, 12))
    return np.concatenate([start, rows, sums], axis=1).tobytes()


def scalar_records(tag: str, wall_times: Values, steps: Steps, values: Values) -> bytes:
    """Records of a scalar: float64[N] seconds, int64[N] steps, float64[N] values."""
    parts = []
    # The step is a varint: only steps of one length make rows of one length.
    lengths = np.array([len(varint(step)) for step in steps.tolist()])
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(steps)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        for first in range(begin, end, EVENTS_AT_ONCE):
            part = slice(first, min(end, first + EVENTS_AT_ONCE))
            parts.append(records(_events(tag, wall_times[part], steps[part], values[part])))
    return b"".join(parts)


def _events(tag: str, wall_times: Values, steps: Steps, values: Values) -> Bytes:
    """uint8[N, L]: events whose steps have one length.

    The tensor is float32, because TensorBoard's default loader leaves out scalars of other types. Its field
    double_val, which is unused for such a tensor, has the value as float64.
    """
    tensor = (
        field_number(1, DT_FLOAT) + field_bytes(2, b"") + field_bytes(4, bytes(4)) + field_bytes(6, bytes(8))
    )
    scalar = field_text(1, tag) + field_bytes(9, metadata("scalars", data_class=SCALAR_CLASS))
    summary = field_bytes(5, field_bytes(1, scalar + field_bytes(8, tensor)))
    count = len(steps)
    numbers = np.frombuffer(b"".join(map(varint, steps.tolist())), np.uint8).reshape(count, -1)
    with np.errstate(over="ignore"):
        drawn = values.astype(np.float32)
    fixed = np.frombuffer(summary, np.uint8)
    # The last bytes: float32, key and length of field 6, float64.
    middle, end = fixed[-10:-8], len(fixed) - 14
    return np.concatenate(
        [
            _repeated(np.array([0x09], np.uint8), count),
            _as_bytes(wall_times, "<f8"),
            _repeated(np.array([0x10], np.uint8), count),
            numbers,
            _repeated(fixed[:end], count),
            _as_bytes(drawn, "<f4"),
            _repeated(middle, count),
            _as_bytes(values, "<f8"),
        ],
        axis=1,
    )


def _as_bytes(values: NDArray[Any], kind: str) -> Bytes:
    """uint8[N, size of the type]."""
    return np.ascontiguousarray(values, kind).view(np.uint8).reshape(len(values), -1)


def _repeated(content: Bytes, count: int) -> Bytes:
    """uint8[count, L] with equal rows."""
    return np.broadcast_to(content, (count, len(content)))
