"""Bounded readers of binary layouts: the log format of LevelDB, and the wire format of protocol buffers."""

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from fp8scope.binary import protobuf
from fp8scope.importing.limits import MAX_RECORD, MIB
from fp8scope.importing.model import UnreadableError

BLOCK: Final = 32_768
HEADER: Final = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
MAX_FIELDS: Final = 1_000_000

Field = tuple[int, int | bytes]
"""The number of a field, and its value: an integer, or bytes (of fixed numbers, too)."""


class TornError(UnreadableError):
    """A record is incomplete, as at the end of a file whose process was killed."""


def log_records(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield the records of a LevelDB log whose first block has `offset` bytes before its first record.

    A record is a checksum (CRC-32), a length and a kind, then data; one that does not fit into a block
    goes on in the next one.

    Raises:
        TornError: the file ends inside of a record.
        UnreadableError: it is damaged, or a record is larger than MAX_RECORD.
    """
    parts: list[bytes] = []
    size = 0
    while block := file.read(BLOCK - offset):
        at = 0
        while at + HEADER <= len(block):
            checksum = int.from_bytes(block[at : at + 4], "little")
            length, kind = int.from_bytes(block[at + 4 : at + 6], "little"), block[at + 6]
            if kind == 0 and length == 0:
                break
            end = at + HEADER + length
            if end > len(block):
                raise TornError("the file ends inside of a record")
            data = block[at + HEADER : end]
            if kind not in (FULL, FIRST, MIDDLE, LAST) or zlib.crc32(block[at + 6 : end]) != checksum:
                raise UnreadableError("a record is damaged: its checksum differs")
            if (kind in (FULL, FIRST)) == bool(parts):
                raise UnreadableError("a record is damaged: its parts do not follow each other")
            size += length
            if size > MAX_RECORD:
                raise UnreadableError(f"a record is larger than {MAX_RECORD // MIB} MiB")
            if kind == FULL:
                yield data
                size = 0
            elif kind == LAST:
                yield b"".join((*parts, data))
                parts, size = [], 0
            else:
                parts.append(data)
            at = end
        if len(block) < BLOCK - offset and any(block[at:]):
            raise TornError("the file ends inside of a record")
        offset = 0
    if parts:
        raise TornError("the file ends inside of a record")


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message. Raises UnreadableError if it is malformed."""
    try:
        for number, (field, kind, first, second) in enumerate(protobuf.fields(data)):
            if number >= MAX_FIELDS:
                raise UnreadableError(f"a message has more than {MAX_FIELDS:,} fields")
            yield field, first if kind == protobuf.VARINT else data[first:second]
    except protobuf.ProtobufError as error:
        raise UnreadableError(f"a message is malformed: {error}") from None


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it. Raises UnreadableError without one."""
    try:
        return protobuf.varint(data, at, len(data))
    except protobuf.ProtobufError as error:
        raise UnreadableError(f"a message is malformed: {error}") from None
