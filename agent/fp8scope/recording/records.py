"""The records of a spool, each framed with its length and checksum.

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
"""A memoryview must be C-contiguous; its bytes are used as they lie in memory."""

FRAME = struct.Struct("<IIB")
MAX_PAYLOAD = 256 << 20
CHECKED_AT_ONCE = 5120
"""zlib releases the GIL for larger inputs. The training thread, which may be the one that writes, would then
have to wait until it gets the GIL back.
"""
_ROW = struct.Struct("<qqqIIHI")
_HISTOGRAM = struct.Struct("<qqII")


class RecordKind(enum.IntEnum):
    """The payload of ROW is `Row.encode`, of HISTOGRAM `ExponentHistograms.encode`, and of MEDIA a line of
    JSON and the content; the others are JSON.
    """

    REGISTRATION = 1
    TENSORS = 2
    ROW = 3
    EVALUATION = 4
    FINISH = 5
    HISTOGRAM = 6
    REPORT = 7
    MEDIA = 8


class TornRecordError(ValueError):
    """The bytes are not a complete record: the process died while writing, or the disk lost data."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record and its position in the spool, from `begin` up to `end`."""

    kind: RecordKind
    payload: bytes
    begin: int
    end: int


def frame(kind: RecordKind, *payload: Bytes) -> bytes:
    """Return the header of a record; the payload may be given in pieces."""
    return FRAME.pack(size_of(payload), _checksum(kind, *payload), kind)


def size_of(pieces: Sequence[Bytes]) -> int:
    """Return the total size of `pieces` in bytes."""
    return sum([piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces])


def check_frame(header: bytes, payload: bytes) -> RecordKind:
    """Return the kind of a framed payload. Raises TornRecordError if length, kind or checksum is wrong."""
    length, checksum, kind = FRAME.unpack(header)
    if length != len(payload) or checksum != _checksum(kind, payload):
        raise TornRecordError("the checksum does not match")
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
    """Serialise to canonical JSON: the same document gives the same bytes in every process."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def wire_number(value: float) -> float | str:
    """Convert a number for JSON: non-finite values become strings, as docs/wire.md defines."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def load_json(payload: bytes) -> dict[str, Any]:
    """Return the document of a JSON record. Raises TornRecordError if it is not an object."""
    document = json.loads(payload)
    if not isinstance(document, dict):
        raise TornRecordError("the record is not a JSON object")
    return document


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """One training step.

    `statistics` is float64 [tensors, statistics] in the order of the catalogue. A tensor whose first
    statistic (`numel`) is 0 was not observed. `extras` are statistics that only some steps have, float64
    [tensors] each. In both, NaN means unknown. `time_us` is microseconds since 1970, UTC. `dropped` is the
    number of rows that this writer has dropped so far.
    """

    step: int
    time_us: int
    dropped: int
    scalars: Mapping[str, float]
    statistics: NDArray[np.float64]
    extras: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def pieces(self) -> list[Bytes]:
        """Return the payload of a ROW record in pieces, without copying the matrices."""
        names, extra_names = "\n".join(self.scalars).encode(), "\n".join(self.extras).encode()
        tensors, width = self.statistics.shape
        head = _ROW.pack(self.step, self.time_us, self.dropped, len(names), tensors, width, len(extra_names))
        values = struct.pack(f"<{len(self.scalars)}d", *self.scalars.values())
        pieces: list[Bytes] = [head + names + extra_names + values, _little(self.statistics)]
        if self.extras:
            pieces += [_little(matrix) for matrix in self.extras.values()]
        return pieces

    def encode(self) -> bytes:
        """Return the payload of a ROW record."""
        return b"".join(self.pieces())

    @classmethod
    def decode(cls, payload: bytes) -> "Row":
        """Decode a payload from `encode`. Raises TornRecordError if the sizes are inconsistent."""
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
            step=step,
            time_us=time_us,
            dropped=dropped,
            scalars=dict(zip(names, values.tolist(), strict=True)),
            statistics=statistics.reshape(tensors, width),
            extras=dict(zip(extra_names, extras.reshape(len(extra_names), tensors), strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExponentHistograms:
    """The distribution of the exponents of some tensors in one step.

    `tensors` is int32 [n]: indices into the writer's catalogue. `counts` is float64 [n, bins]: zeros, then
    one bin per exponent, then NaN and Inf; see docs/watching.md.
    """

    step: int
    time_us: int
    tensors: NDArray[np.int32]
    counts: NDArray[np.float64]

    def encode(self) -> bytes:
        """Return the payload of a HISTOGRAM record. Compression is about 20-fold, as most bins are empty."""
        number, bins = self.counts.shape
        head = _HISTOGRAM.pack(self.step, self.time_us, number, bins)
        packed = zlib.compress(_little(self.counts), 1)
        return b"".join((head, self.tensors.astype("<i4", copy=False).tobytes(), packed))

    @classmethod
    def decode(cls, payload: bytes) -> "ExponentHistograms":
        """Decode a payload from `encode`. Raises TornRecordError if the sizes are inconsistent."""
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
    """Return the values as little-endian bytes, without a copy on little-endian machines."""
    return values.astype("<f8", order="C", copy=False).data
