"""Images, texts, tables and files that other tools keep beside their numbers, within the bounds of a run.

Paths in a file are the input of somebody else: only regular files below the folder of the source are read.
Nothing is decoded or executed; the server checks what an image claims to be.
"""

import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.model import SourceMedia, UnreadableError
from fp8scope.importing.values import MAX_STEP, mapping_of, parse_json, text_of
from fp8scope.recording.media import (
    CAPTION_LENGTH,
    FILE_BYTES,
    NAME_LENGTH,
    TEXT_BYTES,
    MediaKind,
    is_image,
    table_content,
    text_content,
)
from fp8scope.recording.media_bounds import LeftOutError, MediaBounds

MAX_WAITING: Final = 4_096
"""Media of one record; each is read when it is taken."""


class MediaReader:
    """Takes the media that a reader comes across, and yields them in their order.

    Args:
        folder: has the files that the source names; None if it has none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._waiting: list[Callable[[], SourceMedia]] = []
        self._bounds = MediaBounds()
        self._left_out: Counter[str] = Counter()

    def add_text(self, name: str, step: int, text: str) -> None:
        """Add a text; it is cut at 64 KiB."""
        self._add(lambda: _media("text", name, step, text_content(text)[0]))

    def add_table(self, name: str, step: int, columns: Sequence[Any], rows: Iterable[Any]) -> None:
        """Add a table; rows and columns that are too many are cut."""
        self._add(lambda: _table(name, step, columns, rows))

    def add_file(self, name: str, step: int, where: Any, *, caption: Any = "", file_name: str = "") -> None:
        """Add a file below the folder: an image if its content is one, else a file."""

        def read() -> SourceMedia:
            body = self._content(where)
            kind: MediaKind = "image" if is_image(body) else "file"
            own = file_name or str(where).rpartition("/")[2]
            return _media(kind, name, step, body, caption=caption, file_name="" if kind == "image" else own)

        self._add(read)

    def add_table_file(self, name: str, step: int, where: Any) -> None:
        """Add a table from a file of JSON with `columns` and `data`."""

        def read() -> SourceMedia:
            document = mapping_of(parse_json(self._content(where), "a table"))
            return _table(name, step, document.get("columns"), document.get("data"))

        self._add(read)

    def add_text_file(self, name: str, step: int, where: Any) -> None:
        """Add a file as a text, or as a file if it is long or no UTF-8."""

        def read() -> SourceMedia:
            body = self._content(where)
            try:
                is_text = len(body) <= TEXT_BYTES and "\0" not in body.decode()
            except UnicodeDecodeError:
                is_text = False
            file_name = str(where).rpartition("/")[2]
            return _media("text" if is_text else "file", name, step, body, file_name=file_name)

        self._add(read)

    def leave_out(self, reason: str) -> None:
        """Count a media that has no kind here."""
        self._left_out[reason] += 1

    def take(self) -> Iterator[SourceMedia]:
        """Yield what was added since the last call, and read it."""
        waiting, self._waiting = self._waiting, []
        for make in waiting:
            try:
                media = make()
                self._count(media)
            except (LeftOutError, UnreadableError, ValueError, TypeError, OSError) as error:
                has_reason = isinstance(error, LeftOutError)
                self.leave_out(str(error) if has_reason else "their content is not what they are said to be")
            else:
                yield media

    def notes(self) -> list[str]:
        """The media that were left out, by reason."""
        return [f"{count:,} media left out: {reason}." for reason, count in self._left_out.items()]

    def _add(self, make: Callable[[], SourceMedia]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.leave_out("one record names too many")
        else:
            self._waiting.append(make)

    def _count(self, media: SourceMedia) -> None:
        if not 0 <= media.step <= MAX_STEP:
            raise LeftOutError("they have no step")
        self._bounds.take(media.name, media.step, len(media.content))

    def _content(self, where: Any) -> bytes:
        if self._folder is None or not isinstance(where, str):
            raise LeftOutError("their files are not beside the source")
        return read_below(self._folder, where)


def read_below(folder: Path, where: str) -> bytes:
    """Return the content of a regular file below a folder.

    Raises:
        LeftOutError: the path leads out of the folder, or to no file of 1 byte to 8 MiB.
    """
    try:
        path = (folder / where).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise LeftOutError("their paths lead out of the folder of the source")
        if not stat.S_ISREG(path.stat().st_mode):
            raise LeftOutError("their files are not beside the source")
        with path.open("rb") as file:
            body = file.read(FILE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, LeftOutError):
            raise
        raise LeftOutError("their files are not beside the source") from error
    if not 0 < len(body) <= FILE_BYTES:
        raise LeftOutError(f"their files do not have 1 byte to {FILE_BYTES >> 20} MiB")
    return body


def _table(name: str, step: int, columns: Any, rows: Any) -> SourceMedia:
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise LeftOutError("a table has no columns and rows")
    return _media("table", name, step, table_content(None, columns, rows)[0])


def _media(
    kind: MediaKind, name: str, step: int, content: bytes, *, caption: Any = "", file_name: str = ""
) -> SourceMedia:
    name = text_of(name)[-NAME_LENGTH:].strip()
    if not name:
        raise LeftOutError("they have no name")
    caption = text_of(caption)[:CAPTION_LENGTH] if isinstance(caption, str) else ""
    return SourceMedia(
        kind=kind, name=name, step=step, content=content, caption=caption, file_name=text_of(file_name)[-255:]
    )
