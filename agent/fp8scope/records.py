"""What the spool holds: records, each framed with its length and checksum.

A record is `length (uint32) | crc32 of kind and payload (uint32) | kind (uint8) | payload`, little-endian.
"""

import enum
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRAME = struct.Struct("<IIB")
MAX_PAYLOAD = 256 << 20
_ROW = struct.Struct("<qqqIIH")


class Kind(enum.IntEnum):
    """REGISTRATION, TENSORS, EVALUATION and FINISH are JSON; ROW is `Row.encode`."""

    REGISTRATION = 1
    TENSORS = 2
    ROW = 3
    EVALUATION = 4
    FINISH = 5


class TornRecordError(ValueError):
    """The bytes are not a whole record: the process died while it wrote, or the disk lost them."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record and where it lies: from position `begin` of the spool up to `end`."""

    kind: Kind
    payload: bytes
    begin: int
    end: int


def frame(kind: Kind, payload: bytes) -> bytes:
    """The record's bytes."""
    return FRAME.pack(len(payload), _checksum(kind, payload), kind) + payload


def check_frame(header: bytes, payload: bytes) -> Kind:
    """The kind of a framed payload. Raises TornRecordError when length, kind or checksum do not fit."""
    length, checksum, kind = FRAME.unpack(header)
    if length != len(payload) or checksum != _checksum(kind, payload):
        raise TornRecordError("the checksum does not fit")
    try:
        return Kind(kind)
    except ValueError:
        raise TornRecordError(f"there is no record kind {kind}") from None


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes([kind])))


def dump_json(document: Mapping[str, Any]) -> bytes:
    """Canonical JSON: the same document is the same bytes, in every process."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


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
    statistic (`numel`) is 0 was not observed. `time_us` is microseconds since 1970, UTC. `dropped` is the
    number of rows that this writer had had to drop by then.
    """

    step: int
    time_us: int
    dropped: int
    scalars: Mapping[str, float]
    statistics: NDArray[np.float64]

    def encode(self) -> bytes:
        """The payload of a ROW record."""
        names = "\n".join(self.scalars).encode()
        tensors, width = self.statistics.shape
        head = _ROW.pack(self.step, self.time_us, self.dropped, len(names), tensors, width)
        values = np.fromiter(self.scalars.values(), "<f8", len(self.scalars))
        return b"".join((head, names, values.tobytes(), self.statistics.astype("<f8", copy=False).tobytes()))

    @classmethod
    def decode(cls, payload: bytes) -> "Row":
        """Undo `encode`. Raises TornRecordError when the sizes do not fit."""
        try:
            step, time_us, dropped, length, tensors, width = _ROW.unpack_from(payload)
            at = _ROW.size + length
            text = payload[_ROW.size : at].decode()
            names = text.split("\n") if text else []
            values = np.frombuffer(payload, "<f8", len(names), at)
            statistics = np.frombuffer(payload, "<f8", tensors * width, at + 8 * len(names))
        except (struct.error, ValueError) as error:
            raise TornRecordError(f"the row cannot be read: {error}") from None
        scalars = dict(zip(names, values.tolist(), strict=True))
        return cls(step, time_us, dropped, scalars, statistics.reshape(tensors, width))
