"""Images, texts, tables and files that a script gives to the run, as bounded bytes for the spool."""

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope.recording.records import dump_json
from fp8scope.scalars import is_tensor

MediaKind = Literal["image", "text", "table", "file"]
FILE_BYTES: Final = 8 << 20
TEXT_BYTES: Final = 64 << 10
TABLE_ROWS: Final = 1_000
TABLE_COLUMNS: Final = 64
CELL_LENGTH: Final = 1_000
MAX_SIDE: Final = 16_384
MAX_PIXELS: Final = 16 << 20
"""Of an image that is encoded here: larger ones take the processor from the training."""
NAME_LENGTH: Final = 128
CAPTION_LENGTH: Final = 500
IMAGE_BEGINS: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
COMPRESSION: Final = 4
"""Of PNG: a half of the time of zlib's default, for files that are a few per cent larger."""


@dataclass(frozen=True, kw_only=True)
class LoggedMedia:
    """A media that waits for the recorder.

    Attributes:
        content: makes its bytes; called on another thread than the script's.
        held: bytes of memory that it holds until then.
    """

    name: str
    kind: MediaKind
    step: int
    caption: str
    content: Callable[[], bytes]
    held: int
    file_name: str = ""

    def head(self, body: bytes) -> dict[str, Any]:
        """The first line of the message with the content `body`, without writer and seq; see docs/wire.md."""
        return {
            "name": self.name,
            "kind": self.kind,
            "step": self.step,
            "caption": self.caption,
            "file_name": self.file_name,
            "sha256": hashlib.sha256(body).hexdigest(),
            "size": len(body),
        }


def joined(head: Mapping[str, Any], body: bytes) -> bytes:
    """A message: one line of JSON, then the content, which may be empty."""
    return dump_json(head) + b"\n" + body


def logged(
    kind: MediaKind,
    name: str,
    content: "bytes | PendingImage",
    *,
    step: int,
    caption: str,
    file_name: str = "",
) -> LoggedMedia:
    """Return a media with checked names. Raises ValueError if one is invalid."""
    name, file_name = str(name).strip(), str(file_name)
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise ValueError(f"name must be a text of 1 to {NAME_LENGTH} printable characters, got {name!r:.200}")
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if isinstance(content, bytes):
        body = content
        if not 1 <= len(body) <= FILE_BYTES:
            raise ValueError(f"a content must have 1 to {FILE_BYTES:,} bytes, got {len(body):,}")
        make, held = (lambda: body), len(body)
    else:
        make, held = content.encode, content.pixels.nbytes
    return LoggedMedia(
        name=name,
        kind=kind,
        step=int(step),
        caption=_one_line(caption)[:CAPTION_LENGTH],
        content=make,
        held=held,
        file_name=_one_line(file_name)[-255:],
    )


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in str(text)).strip()


# Images


@dataclass(frozen=True, eq=False)
class PendingImage:
    """A copy of an image: [height, width] or [height, width, channels], of any numbers."""

    pixels: NDArray[Any]

    def encode(self) -> bytes:
        """Return it as PNG."""
        return png_of(as_bytes(self.pixels))


def image_content(image: Any) -> "bytes | PendingImage":
    """Return the bytes of an encoded image, or a copy of its pixels.

    Takes the bytes or the path of a PNG, JPEG, WebP or GIF, a PIL image, a matplotlib figure, and arrays and
    tensors of the shapes [H, W], [H, W, C] and [C, H, W], C being 1, 3 or 4. A tensor on a device is copied
    to the host, which waits for the device.

    Raises:
        ValueError: it is none of these, or too large.
        OSError: the file cannot be read.
    """
    if isinstance(image, str | os.PathLike):
        image = file_content(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return _encoded(bytes(image))
    if callable(getattr(image, "savefig", None)):
        buffer = io.BytesIO()
        image.savefig(buffer, format="png")
        return buffer.getvalue()
    if hasattr(image, "convert") and hasattr(image, "mode"):
        image = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA")
    elif is_tensor(image):
        image = image.detach().float().cpu().numpy() if image.is_floating_point() else image.cpu().numpy()
        return PendingImage(_laid_out(image, channels_first=True).copy())
    pixels = np.array(image)
    return PendingImage(_laid_out(pixels, channels_first=False))


def is_image(body: bytes) -> bool:
    """Return whether a content begins as a PNG, JPEG, WebP or GIF does."""
    return body.startswith(IMAGE_BEGINS) or (body[:4] == b"RIFF" and body[8:12] == b"WEBP")


def _encoded(body: bytes) -> bytes:
    if not is_image(body):
        raise ValueError("the bytes are no PNG, JPEG, WebP or GIF; log other files by log_file")
    return body


def _laid_out(pixels: NDArray[Any], *, channels_first: bool) -> NDArray[Any]:
    """Return the pixels as [H, W] or [H, W, C]. `channels_first`: read [3, H, 3] as [C, H, W]."""
    if pixels.dtype.kind not in "biuf":
        raise ValueError(f"an image must have numbers, got an array of {pixels.dtype}")
    if pixels.ndim == 4 and pixels.shape[0] == 1:
        pixels = pixels[0]
    if pixels.ndim == 3:
        first, last = (pixels.shape[axis] in (1, 3, 4) for axis in (0, 2))
        if not first and not last:
            raise ValueError(f"an image of shape {pixels.shape} has not 1, 3 or 4 channels")
        if first and (channels_first or not last):
            pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim not in (2, 3):
        raise ValueError(f"an image has 2 or 3 dimensions, got the shape {pixels.shape}")
    height, width = pixels.shape[:2]
    if not height or not width or max(height, width) > MAX_SIDE or height * width > MAX_PIXELS:
        raise ValueError(f"an image must have 1 to {MAX_PIXELS:,} pixels, got {height} x {width}")
    return pixels


def as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels as bytes: floats from 0 to 1 become 0 to 255, integers stay, truths are black and white.

    What exceeds these ranges is clamped; NaN is black.
    """
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind == "f":
        pixels = np.nan_to_num(pixels.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0) * 255.0 + 0.5
    clamped: NDArray[np.uint8] = np.clip(pixels, 0, 255).astype(np.uint8)
    return clamped


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Encode uint8 [H, W] or [H, W, C] as PNG (RFC 2083), each row as its difference from the last."""
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    channels = rows.shape[1] // width
    colour = {1: 0, 3: 2, 4: 6}[channels]
    filtered = np.empty((height, rows.shape[1] + 1), np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    data = zlib.compress(filtered.data, COMPRESSION)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", data), _chunk(b"IEND", b""))
    return IMAGE_BEGINS[0] + b"".join(parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


# Texts, files


def text_content(text: Any) -> tuple[bytes, bool]:
    """Return a text in UTF-8, and whether it was cut at TEXT_BYTES."""
    body = str(text).encode("utf-8", "replace").replace(b"\0", b"")
    if len(body) <= TEXT_BYTES:
        return body or b" ", False
    return body[:TEXT_BYTES].decode("utf-8", "ignore").encode(), True


def file_content(path: "str | os.PathLike[str]") -> bytes:
    """Return the content of a file. Raises OSError, or ValueError if it is larger than FILE_BYTES."""
    with open(path, "rb") as file:
        body = file.read(FILE_BYTES + 1)
    if len(body) > FILE_BYTES:
        raise ValueError(
            f"{os.fspath(path)!r:.200} has more than {FILE_BYTES:,} bytes; link it by log_artefact instead"
        )
    return body


# Tables


def table_content(
    table: Any, columns: Sequence[Any] | None, rows: Iterable[Any] | None
) -> tuple[bytes, bool]:
    """Return a table as JSON, and whether rows, columns or cells were cut.

    `table` is a pandas or Polars DataFrame, a pyarrow Table, or a mapping of names to columns; else `columns`
    and `rows` are given. Raises ValueError for anything else.
    """
    if table is not None:
        columns, rows = _parts_of(table)
    if columns is None or rows is None:
        raise ValueError("a table needs columns and rows, or a data frame")
    names = [str(name) for name in columns]
    if not names:
        raise ValueError("a table needs at least one column")
    cut = len(names) > TABLE_COLUMNS
    shown: list[list[Any]] = []
    for row in rows:
        if len(shown) == TABLE_ROWS:
            cut = True
            break
        cells = list(row)
        if len(cells) != len(names):
            raise ValueError(f"a row has {len(cells)} cells, and there are {len(names)} columns")
        shown.append([_cell(cell) for cell in cells[:TABLE_COLUMNS]])
    document = {"columns": [name[:CELL_LENGTH] for name in names[:TABLE_COLUMNS]], "rows": shown}
    body = dump_json(document)
    while len(body) > FILE_BYTES and shown:
        cut = True
        del shown[len(shown) // 2 :]
        body = dump_json(document)
    return body, cut


def _parts_of(table: Any) -> tuple[Sequence[Any], Iterable[Any]]:
    """The names of the columns and the rows of a data frame or a mapping, at most one row too many."""
    most = TABLE_ROWS + 1
    if isinstance(table, Mapping):
        return list(table), zip(*(list(column)[:most] for column in table.values()), strict=True)
    if hasattr(table, "column_names") and hasattr(table, "slice"):
        pieces = [column.to_pylist() for column in table.slice(0, most).columns]
        return table.column_names, zip(*pieces, strict=True)
    if hasattr(table, "itertuples"):
        return list(table.columns), table.head(most).itertuples(index=False, name=None)
    if hasattr(table, "iter_rows"):
        return list(table.columns), table.head(most).iter_rows()
    raise ValueError(f"a table cannot be made of {type(table).__name__}")


def _cell(value: Any) -> Any:
    """A cell as JSON has it: numbers and truths stay, everything else is text."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    if isinstance(value, float) and np.isfinite(value):
        return value
    return str(value).replace("\0", "")[:CELL_LENGTH]
