"""What the spool holds: records, each framed with its length and checksum.

A record is `length (uint32) | crc32 of kind and payload (uint32) | kind (uint8) | payload`, little-endian.
"""

import enum
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = bytes | memoryview
"""Of an array's memory, which must be C-contiguous, the bytes as they lie there."""

FRAME = struct.Struct("<IIB")
MAX_PAYLOAD = 256 << 20
CHECKED_AT_ONCE = 5120
"""For more bytes zlib lets go of the interpreter, and the training thread, which may be the one that writes,
would have to wait for whoever takes it.
"""
_ROW = struct.Struct("<qqqIIHI")
_HISTOGRAM = struct.Struct("<qqII")


class RecordKind(enum.IntEnum):
    """ROW is `Row.encode`, HISTOGRAM is `Histograms.encode`; the others are JSON."""

    REGISTRATION = 1
    TENSORS = 2
    ROW = 3
    EVALUATION = 4
    FINISH = 5
    HISTOGRAM = 6
    REPORT = 7


class TornRecordError(ValueError):
    """The bytes are not a whole record: the process died while it wrote, or the disk lost them."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record and where it lies: from position `begin` of the spool up to `end`."""

    kind: RecordKind
    payload: bytes
    begin: int
    end: int


def frame(kind: RecordKind, *payload: Bytes) -> bytes:
    """What comes before a record's payload, which may be given in pieces."""
    return FRAME.pack(size_of(payload), _checksum(kind, *payload), kind)


def size_of(pieces: Sequence[Bytes]) -> int:
    """Bytes in all of them."""
    return sum([piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces])


def check_frame(header: bytes, payload: bytes) -> RecordKind:
    """The kind of a framed payload. Raises TornRecordError when length, kind or checksum do not fit."""
    length, checksum, kind = FRAME.unpack(header)
    if length != len(payload) or checksum != _checksum(kind, payload):
        raise TornRecordError("the checksum does not fit")
    try:
        return RecordKind(kind)
    except ValueError:
        raise TornRecordError(f"there is no record kind {kind}") from None


def _checksum(kind: int, *payload: Bytes) -> int:
    checksum = zlib.crc32(bytes((kind,)))
    for piece in payload:
        if size_of((piece,)) <= CHECKED_AT_ONCE:
            checksum = zlib.crc32(piece, checksum)
            continue
        view = memoryview(piece).cast("B")
        for at in range(0, len(view), CHECKED_AT_ONCE):
            checksum = zlib.crc32(view[at : at + CHECKED_AT_ONCE], checksum)
    return checksum


def dump_json(document: Mapping[str, Any]) -> bytes:
    """Canonical JSON: the same document is the same bytes, in every process."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def wire_number(value: float) -> float | str:
    """A number as JSON can carry it: what is not finite, as docs/wire.md writes it."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def load_json(payload: bytes) -> dict[str, Any]:
    """The document of a JSON record. Raises TornRecordError when it is not an object."""
    document = json.loads(payload)
    if not isinstance(document, dict):
        raise TornRecordError("the record holds no object")
    return document


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training step.

    `statistics` is float64 [tensors, statistics] in the order of the catalogue; a tensor whose first
    statistic (`numel`) is 0 was not observed. `extras` are further statistics, float64 [tensors] each, of the
    steps in which they were taken. In both NaN stands for what is not known. `time_us` is microseconds since
    1970, UTC. `dropped` is the number of rows that this writer had had to drop by then.
    """

    step: int
    time_us: int
    dropped: int
    scalars: Mapping[str, float]
    statistics: NDArray[np.float64]
    extras: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def pieces(self) -> list[Bytes]:
        """The payload of a ROW record; the matrices in it are not copied."""
        names, extra_names = "\n".join(self.scalars).encode(), "\n".join(self.extras).encode()
        tensors, width = self.statistics.shape
        head = _ROW.pack(self.step, self.time_us, self.dropped, len(names), tensors, width, len(extra_names))
        values = struct.pack(f"<{len(self.scalars)}d", *self.scalars.values())
        pieces: list[Bytes] = [head + names + extra_names + values, _little(self.statistics)]
        if self.extras:
            pieces += [_little(matrix) for matrix in self.extras.values()]
        return pieces

    def encode(self) -> bytes:
        """The same in one."""
        return b"".join(self.pieces())

    @classmethod
    def decode(cls, payload: bytes) -> "Row":
        """Undo `encode`. Raises TornRecordError when the sizes do not fit."""
        try:
            step, time_us, dropped, length, tensors, width, extra_length = _ROW.unpack_from(payload)
            at = _ROW.size + length
            names = _names(payload[_ROW.size : at])
            extra_names = _names(payload[at : at + extra_length])
            at += extra_length
            values = np.frombuffer(payload, "<f8", len(names), at)
            at += values.nbytes
            statistics = np.frombuffer(payload, "<f8", tensors * width, at)
            at += statistics.nbytes
            extras = np.frombuffer(payload, "<f8", tensors * len(extra_names), at)
        except (struct.error, ValueError) as error:
            raise TornRecordError(f"the row cannot be read: {error}") from None
        return cls(
            step,
            time_us,
            dropped,
            dict(zip(names, values.tolist(), strict=True)),
            statistics.reshape(tensors, width),
            dict(zip(extra_names, extras.reshape(len(extra_names), tensors), strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Histograms:
    """How some tensors' exponents were distributed in one step.

    `tensors` int32 [n]: their places in the writer's catalogue. `counts` float64 [n, bins]: zeros, then one
    bin for each exponent, then NaN and Inf; see docs/watching.md.
    """

    step: int
    time_us: int
    tensors: NDArray[np.int32]
    counts: NDArray[np.float64]

    def encode(self) -> bytes:
        """The payload of a HISTOGRAM record. Most bins are empty: packed, it is a twentieth."""
        number, bins = self.counts.shape
        head = _HISTOGRAM.pack(self.step, self.time_us, number, bins)
        packed = zlib.compress(_little(self.counts), 1)
        return b"".join((head, self.tensors.astype("<i4", copy=False).tobytes(), packed))

    @classmethod
    def decode(cls, payload: bytes) -> "Histograms":
        """Undo `encode`. Raises TornRecordError when the sizes do not fit."""
        try:
            step, time_us, number, bins = _HISTOGRAM.unpack_from(payload)
            tensors = np.frombuffer(payload, "<i4", number, _HISTOGRAM.size)
            unpacked = zlib.decompress(payload[_HISTOGRAM.size + tensors.nbytes :])
            counts = np.frombuffer(unpacked, "<f8").reshape(number, bins)
        except (struct.error, ValueError, zlib.error) as error:
            raise TornRecordError(f"the histograms cannot be read: {error}") from None
        return cls(step, time_us, tensors, counts)


def _names(text: bytes) -> list[str]:
    return text.decode().split("\n") if text else []


def _little(values: NDArray[np.float64]) -> memoryview:
    """As the wire has them: nearly always where they are."""
    return values.astype("<f8", order="C", copy=False).data
