"""A reader of protobuf's wire format, bounded by the bytes that it is given.

It knows no schema: a caller goes through the fields of a message, and reads those whose numbers it knows.
Written by us because the package protobuf refuses generated code of other versions of itself, and a training
machine often has one that is pinned by something else.
"""

import struct
from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5
_GROUP_BEGIN, _GROUP_END = 3, 4
MAX_FIELD: Final = (1 << 29) - 1
MAX_GROUPS: Final = 32
"""Nested groups, which nobody writes any more."""
_DOUBLE = struct.Struct("<d").unpack_from
_FLOAT = struct.Struct("<f").unpack_from
_UINT64 = struct.Struct("<Q").unpack_from
_UINT32 = struct.Struct("<I").unpack_from


class ProtobufError(ValueError):
    """The bytes are no message."""


Field = tuple[int, int, int, int]
"""Number, wire type, and two integers: value and 0 of a VARINT, start and end of others, in the buffer."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned integer at a position, and the position behind it.

    Raises:
        ProtobufError: it is longer than ten bytes or than the message.
    """
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > 63:
            break
    raise ProtobufError("an integer does not end")


def fields(data: bytes, at: int = 0, end: int | None = None) -> Iterator[Field]:
    """Go through the fields of the message data[at:end], in the order of the bytes.

    Raises:
        ProtobufError: a field has no number or no known type, or is longer than the message.
    """
    end = len(data) if end is None else end
    while at < end:
        key = data[at]
        if key < 0x80:
            at += 1
        else:
            key, at = varint(data, at, end)
        number, kind = key >> 3, key & 7
        if not 0 < number <= MAX_FIELD:
            raise ProtobufError(f"there is no field {number}")
        if kind == BYTES:
            length, at = varint(data, at, end)
            after = at + length
            if after > end:
                raise ProtobufError(f"field {number} is longer than its message")
            yield number, kind, at, after
            at = after
        elif kind == VARINT:
            value, at = varint(data, at, end)
            yield number, kind, value, 0
        elif kind in (FIXED64, FIXED32):
            after = at + (8 if kind == FIXED64 else 4)
            if after > end:
                raise ProtobufError(f"field {number} is longer than its message")
            yield number, kind, at, after
            at = after
        elif kind == _GROUP_BEGIN:
            at = _behind_group(data, at, end, number)
        else:
            raise ProtobufError(f"field {number} has the unknown type {kind}")


def _behind_group(data: bytes, at: int, end: int, number: int) -> int:
    """The position behind a group, whose content is left out."""
    opened = [number]
    while opened:
        key, at = varint(data, at, end)
        kind = key & 7
        if kind == _GROUP_BEGIN:
            opened.append(key >> 3)
            if len(opened) > MAX_GROUPS:
                raise ProtobufError("groups are nested too deeply")
        elif kind == _GROUP_END:
            if opened.pop() != key >> 3:
                raise ProtobufError("a group ends that has not begun")
        elif kind == VARINT:
            _, at = varint(data, at, end)
        elif kind == BYTES:
            length, at = varint(data, at, end)
            at += length
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise ProtobufError(f"a group has a field of the unknown type {kind}")
        if at > end:
            raise ProtobufError("a group is longer than its message")
    return at


def signed(value: int) -> int:
    """The int64 of a VARINT."""
    return value - (1 << 64) if value >> 63 else value


def double(data: bytes, at: int) -> float:
    """The double at a position of eight bytes."""
    value: float = _DOUBLE(data, at)[0]
    return value


def single(data: bytes, at: int) -> float:
    """The float at a position of four bytes."""
    value: float = _FLOAT(data, at)[0]
    return value


def fixed64(data: bytes, at: int) -> int:
    """The unsigned integer at a position of eight bytes."""
    value: int = _UINT64(data, at)[0]
    return value


def fixed32(data: bytes, at: int) -> int:
    """The unsigned integer at a position of four bytes."""
    value: int = _UINT32(data, at)[0]
    return value


def text(data: bytes, at: int, end: int) -> str:
    """The string data[at:end]; what is not UTF-8 becomes a replacement character."""
    return str(data[at:end], "utf-8", "replace")


def varints(data: bytes, at: int, end: int) -> Iterator[int]:
    """The integers of a packed field."""
    while at < end:
        value, at = varint(data, at, end)
        yield value
