"""The event files of one directory, which are one run: their values in order, each with its place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fp8scope.event_files.events import EventReader, LoggedEvent, TaggedMedia
from fp8scope.event_files.framing import RecordFile
from fp8scope.event_files.names import ScalarNames
from fp8scope.event_files.placement import AttemptFinder, FileState, Place
from fp8scope.recording.media import FILE_BYTES, NAME_LENGTH, TEXT_BYTES, MediaKind, is_image, text_content
from fp8scope.recording.media_bounds import LeftOutError, MediaBounds

MAX_FILES: Final = 10_000
MAX_CONFIG: Final = 2_000
"""Entries of the configuration."""
FIRST_TIME_US: Final = 946_684_800_000_000
LAST_TIME_US: Final = 7_258_118_400_000_000
"""2000-01-01 and 2200-01-01 in microseconds since 1970; a clock outside of them was wrong."""


@dataclass(slots=True)
class PlacedValue:
    """A value of a tag, and the stream of rows that it belongs to. `time_us`: microseconds since 1970."""

    where: Place
    step: int
    time_us: int
    names: tuple[str, ...]
    value: float


@dataclass(slots=True, kw_only=True)
class PlacedMedia:
    """An image or a text, and the stream of messages that it belongs to."""

    where: Place
    step: int
    name: str
    kind: MediaKind
    content: bytes


@dataclass(kw_only=True)
class LeftOut:
    """The values that are not stored, and why.

    Attributes:
        steps: their step is negative.
        other_axes: they repeat values over another axis.
        media: the first reason for which an image or a text is not stored; empty if all are.
    """

    steps: int = 0
    other_axes: int = 0
    media: str = ""


class OpenFile:
    """A file of the run, and how far it was read."""

    def __init__(self, path: Path) -> None:
        self.records = RecordFile(path)
        self.events = EventReader()
        self.state = FileState(name=path.name)


@dataclass(kw_only=True)
class LogRun:
    """Reads the files of one directory. Who reads them again gets the same values in the same places.

    Attributes:
        config: the configuration that was found; `config_changed`: it grew since it was last taken.
        first_time_us, last_time_us: of its values.
    """

    names: ScalarNames = field(default_factory=ScalarNames)
    left_out: LeftOut = field(default_factory=LeftOut)
    config: dict[str, Any] = field(default_factory=dict)
    config_changed: bool = False
    first_time_us: int | None = None
    last_time_us: int = FIRST_TIME_US

    def __post_init__(self) -> None:
        self._files: dict[str, OpenFile] = {}
        self._bounds = MediaBounds()
        self._attempts = AttemptFinder()

    @property
    def files(self) -> list[OpenFile]:
        """The files in their order."""
        return list(self._files.values())

    def add_files(self, paths: list[Path]) -> None:
        """Add the files of the directory that are new, sorted by their names, which begin with their time."""
        for path in paths:
            if path.name not in self._files and len(self._files) < MAX_FILES:
                self._files[path.name] = OpenFile(path)

    def read(self) -> tuple[list[PlacedValue | PlacedMedia], bool]:
        """Return the next values, of about a megabyte, and whether there may be more at once.

        Files are read one after the other; a file that has ended is still read when it grows.

        Raises:
            OSError: a file cannot be read.
        """
        for file in self._files.values():
            records, has_more = file.records.read()
            if records or has_more:
                return list(self._values(file, records)), True
        return [], False

    def _values(self, file: OpenFile, records: list[bytes]) -> Iterator[PlacedValue | PlacedMedia]:
        for record in records:
            event = file.events.read(record)
            if event is None:
                continue
            if event.is_start:
                self._attempts.start(file.state, event.step)
            # Texts before the first value are settings, as Megatron's; later ones are samples.
            are_settings = self.first_time_us is None
            if event.config and (event.is_hparams or are_settings):
                self._configure(event.config)
            if event.values:
                yield from self._placed(file, event)
            for media in event.media:
                if not (are_settings and media.kind == "text" and media.tag in event.config):
                    yield from self._placed_media(file, event.step, media)

    def _placed(self, file: OpenFile, event: LoggedEvent) -> Iterator[PlacedValue]:
        step, time_us = event.step, _microseconds(event.wall_time)
        if step < 0:
            self.left_out.steps += len(event.values)
            return
        if self.first_time_us is None:
            self.first_time_us = time_us
        self.last_time_us = max(self.last_time_us, time_us)
        for value in event.values:
            names = self.names.names_of(value.tag)
            if names:
                where = self._attempts.place(file.state, value.tag, step)
                yield PlacedValue(where, step, time_us, names, value.value)
            else:
                self.left_out.other_axes += value.tag not in self.names.left_out

    def _placed_media(self, file: OpenFile, step: int, media: TaggedMedia) -> Iterator[PlacedMedia]:
        """An image or a text within the bounds. It begins no attempt."""
        try:
            if step < 0:
                raise LeftOutError("their steps are negative")
            content = media.content if media.kind == "image" else text_content(_decoded(media.content))[0]
            if not (is_image(content) if media.kind == "image" else content):
                raise LeftOutError("they are no PNG, JPEG, WebP or GIF")
            if len(content) > FILE_BYTES:
                raise LeftOutError(f"they have more than {FILE_BYTES >> 20} MiB")
            name = "".join(letter if letter.isprintable() else " " for letter in media.tag).strip()
            name = name[-NAME_LENGTH:].strip() or "media"
            self._bounds.take(name, step, len(content))
        except LeftOutError as error:
            self.left_out.media = self.left_out.media or str(error)
        else:
            where = self._attempts.look(file.state, step)
            yield PlacedMedia(where=where, step=step, name=name, kind=media.kind, content=content)

    def _configure(self, config: dict[str, Any]) -> None:
        for name, value in config.items():
            if len(self.config) < MAX_CONFIG and self.config.get(name, self) != value:
                self.config[name] = value
                self.config_changed = True


def _decoded(content: bytes) -> str:
    return content[: 2 * TEXT_BYTES].decode("utf-8", "replace")


def _microseconds(seconds: float) -> int:
    if not math.isfinite(seconds):
        return FIRST_TIME_US
    return min(max(int(seconds * 1e6), FIRST_TIME_US), LAST_TIME_US - 1)
