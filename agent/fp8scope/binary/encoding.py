"""The encoding of protocol buffers, as TensorBoard's event files and Prometheus' remote write need it."""

import struct

VARINT, FIXED64, BYTES = 0, 1, 2


def varint(number: int) -> bytes:
    """A whole number from 0 to 2^64 - 1, seven bits a byte."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def field_bytes(field: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return varint(field << 3 | BYTES) + varint(len(content)) + content


def field_text(field: int, text: str) -> bytes:
    """A field of text; halves of surrogate pairs become question marks."""
    return field_bytes(field, text.encode(errors="replace"))


def field_number(field: int, number: int) -> bytes:
    """A field of a whole number, an enumeration or a bool."""
    return varint(field << 3 | VARINT) + varint(number)


def field_double(field: int, value: float) -> bytes:
    """A field of a float64."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)
