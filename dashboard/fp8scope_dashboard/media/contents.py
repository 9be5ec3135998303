"""The content of media: whether it is what its kind says, and how it is read back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import connection

from fp8scope_dashboard.media import limits
from fp8scope_dashboard.media.models import MediaChunk, MediaContent, MediaKind
from fp8scope_dashboard.media.sniffing import SniffedImage, sniff
from fp8scope_dashboard.wire.errors import InvalidError

ADVISORY: Final = 0x66706D64
"""The first key of the lock on the media of a project; the second is its id."""
_UNSAFE: Final = re.compile(r"[^\w.\- ]+")
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class MediaTable:
    """A table: the names of its columns, and its rows."""

    columns: list[str]
    rows: list[list[Cell]]


def check(kind: str, body: bytes) -> SniffedImage | None:
    """Check that a content is what its kind says. Returns what is known of it if it is an image.

    Raises:
        InvalidError: it is not, or it exceeds a bound.
    """
    image = sniff(body)
    if image is not None and _is_too_large(image):
        raise InvalidError(
            f"The image has {image.width} x {image.height} pixels; at most {limits.MAX_SIDE:,} on a side and "
            f"{limits.MAX_PIXELS >> 20} Mi in all are taken.",
            "Scale it down before it is logged.",
        )
    if kind == MediaKind.IMAGE and image is None:
        raise InvalidError(
            "The content is no PNG, JPEG, WebP or GIF.", "Send other formats with the kind file: a download."
        )
    if kind == MediaKind.TEXT:
        text_in(body)
    elif kind == MediaKind.TABLE:
        table_in(body)
    return image


def _is_too_large(image: SniffedImage) -> bool:
    return max(image.width, image.height) > limits.MAX_SIDE or image.width * image.height > limits.MAX_PIXELS


def text_in(body: bytes) -> str:
    """The text of a content.

    Raises:
        InvalidError: it is no UTF-8, or too long.
    """
    if len(body) > limits.TEXT_BYTES:
        raise InvalidError(
            f"A text may have {limits.TEXT_BYTES:,} bytes, this one has {len(body):,}.",
            "Send it with the kind file, or shorten it.",
        )
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidError("The text is no UTF-8.", "Send it with the kind file.") from error


def table_in(body: bytes) -> MediaTable:
    """The table of a content: `{"columns": [text], "rows": [[number, text, boolean or null]]}`.

    Raises:
        InvalidError: it is none, or exceeds a bound.
    """
    try:
        document = json.loads(body)
        columns, rows = document["columns"], document["rows"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_table("it is no JSON object with `columns` and `rows`") from error
    if not isinstance(columns, list) or not 1 <= len(columns) <= limits.TABLE_COLUMNS:
        raise _no_table(f"it has no list of 1 to {limits.TABLE_COLUMNS} columns")
    if not isinstance(rows, list) or len(rows) > limits.TABLE_ROWS:
        raise _no_table(f"it has no list of at most {limits.TABLE_ROWS:,} rows")
    if not all(isinstance(name, str) and len(name) <= limits.CELL_LENGTH for name in columns):
        raise _no_table("a column's name is no short text")
    if not all(_is_row(row, len(columns)) for row in rows):
        raise _no_table("a row has another length, or a cell that is no number, short text, boolean or null")
    return MediaTable(columns, rows)


def _is_row(row: Any, width: int) -> bool:
    return isinstance(row, list) and len(row) == width and all(_is_cell(cell) for cell in row)


def _is_cell(cell: Any) -> bool:
    if isinstance(cell, str):
        return len(cell) <= limits.CELL_LENGTH
    return cell is None or isinstance(cell, bool | int | float)


def _no_table(reason: str) -> InvalidError:
    return InvalidError(f"The content is no table: {reason}.", "See docs/media.md.")


def lock(project_id: int) -> None:
    """Lock the contents of a project until the transaction ends, so that its quota and its copies hold."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [ADVISORY, project_id & 0x7FFFFFFF])


def create(project_id: int, body: bytes, image: SniffedImage | None) -> MediaContent:
    """Store bytes that the project does not have; within a transaction, after `lock`."""
    content = MediaContent.objects.create(
        project_id=project_id,
        sha256=hashlib.sha256(body).digest(),
        size=len(body),
        type="" if image is None else image.type,
        width=None if image is None else image.width,
        height=None if image is None else image.height,
    )
    pieces = range(0, len(body), limits.CHUNK_BYTES)
    MediaChunk.objects.bulk_create(
        [
            MediaChunk(content=content, number=number, body=body[at : at + limits.CHUNK_BYTES])
            for number, at in enumerate(pieces)
        ],
        batch_size=4,
    )
    return content


def read(content: MediaContent) -> bytes:
    """The bytes of a content."""
    chunks = MediaChunk.objects.filter(content=content).order_by("number")
    return b"".join(bytes(body) for body in chunks.values_list("body", flat=True))


def read_many(contents: Sequence[MediaContent]) -> dict[int, bytes]:
    """The bytes of small contents, by their primary key."""
    bodies: dict[int, bytes] = dict.fromkeys((content.pk for content in contents), b"")
    chunks = MediaChunk.objects.filter(content__in=bodies).order_by("content", "number")
    for pk, body in chunks.values_list("content", "body"):
        bodies[pk] += bytes(body)
    return bodies


def download_name(name: str, file_name: str, image_type: str) -> str:
    """A file name that is safe in a header and on any disk."""
    ending = f".{image_type.partition('/')[2]}" if image_type else ""
    chosen = file_name or f"{name}{ending}"
    return _UNSAFE.sub("_", chosen.replace("/", "_")).strip(". ")[:120] or "file"
