"""The type of an image and its size, from its first bytes. Nothing is decoded.

Only these types are shown in a page. SVG and HTML are not among them: a browser would run their scripts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Markers of JPEG that begin a frame, with its size; without DHT (C4), JPG (C8) and DAC (CC).
JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
MAX_MARKERS: Final = 1_000


@dataclass(frozen=True)
class SniffedImage:
    """The type of an image, and its size in pixels."""

    type: str
    width: int
    height: int


def sniff(body: bytes) -> SniffedImage | None:
    """Return what image these bytes begin; None if it is none that a page shows, or its header is damaged."""
    for kind, magic, read in _FORMATS:
        if magic(body):
            try:
                size = read(body)
            except (struct.error, IndexError):
                return None
            return None if size is None or 0 in size else SniffedImage(kind, *size)
    return None


def _png(body: bytes) -> tuple[int, int] | None:
    if body[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", body, 16)
    return width, height


def _gif(body: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", body, 6)
    return width, height


def _jpeg(body: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(MAX_MARKERS):
        while body[at] == 0xFF and body[at + 1] == 0xFF:
            at += 1
        if body[at] != 0xFF:
            return None
        marker = body[at + 1]
        if marker in JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", body, at + 5)
            return width, height
        at += 2 + struct.unpack_from(">H", body, at + 2)[0]
    return None


def _webp(body: bytes) -> tuple[int, int] | None:
    form = body[12:16]
    if len(body) < 30:
        return None
    if form == b"VP8X":
        return 1 + int.from_bytes(body[24:27], "little"), 1 + int.from_bytes(body[27:30], "little")
    if form == b"VP8L" and body[20] == 0x2F:
        bits = struct.unpack_from("<I", body, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form == b"VP8 " and body[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


Reader = Callable[[bytes], tuple[int, int] | None]
_FORMATS: Final[tuple[tuple[str, Callable[[bytes], bool], Reader], ...]] = (
    ("image/png", lambda body: body.startswith(b"\x89PNG\r\n\x1a\n"), _png),
    ("image/jpeg", lambda body: body.startswith(b"\xff\xd8\xff"), _jpeg),
    ("image/gif", lambda body: body[:6] in (b"GIF87a", b"GIF89a"), _gif),
    ("image/webp", lambda body: body[:4] == b"RIFF" and body[8:12] == b"WEBP", _webp),
)
IMAGE_TYPES: Final = frozenset(kind for kind, _, _ in _FORMATS)
