"""Images, texts, tables and files that a script gives to other trackers, recorded within small bounds."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fp8scope.recording.media import (
    NAME_LENGTH,
    TABLE_ROWS,
    TEXT_BYTES,
    MediaKind,
    PendingImage,
    image_content,
    is_image,
    logged,
    table_content,
    text_content,
)
from fp8scope.scalars import is_tensor

if TYPE_CHECKING:
    from fp8scope.run import Run

MAX_EACH: Final = 4 << 20
"""Bytes of one media, as the script holds it: other trackers are given models and data sets, too."""
MAX_TOTAL: Final = 64 << 20
MAX_COUNT: Final = 2_000
MAX_WAITING: Final = 64
"""Media that wait for the first step of a run."""
MAX_IN_CALL: Final = 8
TEXT_ENDINGS: Final = (".txt", ".md", ".log", ".yaml", ".yml", ".json", ".csv", ".py", ".toml")
logger = logging.getLogger("fp8scope")


@dataclass(frozen=True, kw_only=True)
class TrackedMedia:
    """An image, a text, a table or a file that a tracker was given, as bytes or as a copy of pixels.

    Attributes:
        lacks: the part of it that is not recorded, for people; all of it if the content is empty.
    """

    kind: MediaKind
    name: str
    content: bytes | PendingImage
    caption: str = ""
    file_name: str = ""
    lacks: str = ""

    @property
    def size(self) -> int:
        """The bytes that it holds."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.pixels.nbytes


class MediaCapture:
    """Records tracked media in the run, at its open step. What exceeds a bound is left out and said once."""

    def __init__(self) -> None:
        self._waiting: list[TrackedMedia] = []
        self._count = self._total = 0
        self._said: set[str] = set()

    def take(self, run: "Run | None", tracker: str, media: TrackedMedia) -> None:
        """Record a media, or keep it until a run begins."""
        if media.lacks:
            self.say(tracker, media.lacks)
        if not media.size:
            return
        is_full = self._count >= MAX_COUNT or self._total + media.size > MAX_TOTAL
        if media.size > MAX_EACH or is_full or (run is None and len(self._waiting) >= MAX_WAITING):
            self.say(tracker, f"{media.name[:100]!r} and what is as large, or comes later")
            return
        self._count += 1
        self._total += media.size
        if run is None:
            self._waiting.append(media)
        else:
            _record(run, media)

    def say(self, tracker: str, what: str) -> None:
        """Say, once for each tracker, what is left out."""
        if tracker not in self._said:
            self._said.add(tracker)
            logger.info("media given to %s are recorded, except %s: use run.log_file.", tracker, what)

    def hand_over(self, run: "Run") -> None:
        """Record what waits in a run that has begun."""
        waiting, self._waiting = self._waiting, []
        for media in waiting:
            _record(run, media)


def _record(run: "Run", media: TrackedMedia) -> None:
    if run.session.active and run.session.settings.capture_media:
        step = max(0, run.session.steps.number)
        run.session.log_media(
            logged(
                media.kind,
                media.name[:NAME_LENGTH],
                media.content,
                step=step,
                caption=media.caption,
                file_name=media.file_name,
            )
        )


# What trackers are given


def of_wandb(data: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[TrackedMedia]]:
    """Split what `wandb.log` is given into values, and images and tables of W&B."""
    return _split(data, ("wandb.", "fp8scope.compat."), _of_wandb)


def _split(
    data: Mapping[Any, Any], modules: tuple[str, ...], media_of: Callable[[str, Any], Iterator[TrackedMedia]]
) -> tuple[dict[Any, Any], list[TrackedMedia]]:
    """Split what a tracker is given into values, and what `media_of` makes of objects of its modules."""
    rest: dict[Any, Any] = {}
    split: list[TrackedMedia] = []
    for key, value in data.items():
        values = value if isinstance(value, list | tuple) else [value]
        ours = [item for item in values if type(item).__module__.startswith(modules)]
        try:
            tracked = [media for item in ours[:MAX_IN_CALL] for media in media_of(str(key), item)]
        except (ValueError, TypeError, OSError):
            # Counted with what is no number.
            tracked = []
        if tracked:
            split += tracked
        else:
            rest[key] = value
    return rest, split


def _of_wandb(name: str, value: Any) -> Iterator[TrackedMedia]:
    kind = type(value).__name__
    if kind in ("Image", "LoggedImage") and getattr(value, "image", None) is not None:
        caption = str(getattr(value, "_caption", None) or "")
        yield TrackedMedia(kind="image", name=name, content=image_content(value.image), caption=caption)
    elif kind in ("Table", "LoggedTable"):
        yield _table(name, value.columns, value.data)


def _table(name: str, columns: Sequence[Any], rows: Sequence[Any]) -> TrackedMedia:
    """A table of a tracker. Objects of trackers in its cells are left out, and named."""
    written, lacks = [], ""
    for row in rows[: TABLE_ROWS + 1]:
        cells = list(row)
        for at, cell in enumerate(cells):
            first = cell[0] if isinstance(cell, list) and cell else cell
            if type(first).__module__.startswith(("wandb.", "trackio.")):
                cells[at] = f"({type(first).__name__})"
                lacks = f"the objects in cells of tables, such as {type(first).__name__} in {name[:100]!r}"
        written.append(cells)
    return TrackedMedia(
        kind="table", name=name, content=table_content(None, columns, written)[0], lacks=lacks
    )


TRACKIO_FILES: Final = ("trackio.video", "trackio.audio", "trackio.html", "trackio.object3d")
"""Types that Trackio encodes itself: they are read from the file that it has written."""


def of_trackio(
    data: Mapping[Any, Any],
) -> tuple[dict[Any, Any], list[TrackedMedia], list[tuple[str, Any]]]:
    """Split what `trackio.log` is given into values, media, and objects for `of_trackio_files`."""
    rest, media = _split(data, ("trackio.", "matplotlib."), _of_trackio)
    files = [(str(key), value) for key, value in rest.items() if _type_of(value) in TRACKIO_FILES]
    return {key: value for key, value in rest.items() if _type_of(value) not in TRACKIO_FILES}, media, files


def _type_of(value: Any) -> str:
    """The type that Trackio writes for an object of its own; empty for others."""
    kind = getattr(type(value), "TYPE", "") if type(value).__module__.startswith("trackio.") else ""
    return kind if isinstance(kind, str) else ""


def _of_trackio(name: str, value: Any) -> Iterator[TrackedMedia]:
    kind = _type_of(value)
    if kind == "trackio.image":
        caption = str(value.caption or "")
        yield TrackedMedia(kind="image", name=name, content=image_content(value._value), caption=caption)
    elif kind == "trackio.markdown":
        yield of_text(name, value.text)
    elif kind == "trackio.table" and value.data:
        columns = list(dict.fromkeys(column for row in value.data for column in row))
        rows = [[row.get(column) for column in columns] for row in value.data[: TABLE_ROWS + 1]]
        yield _table(name, columns, rows)
    elif not kind and callable(getattr(value, "savefig", None)):
        yield TrackedMedia(kind="image", name=name, content=image_content(value))


def of_trackio_files(values: Sequence[tuple[str, Any]]) -> Iterator[TrackedMedia]:
    """Videos, sounds, pages and models, from the files that Trackio has written of them."""
    for name, value in values:
        path = value._get_absolute_file_path()
        media = None if path is None else of_file(path, None)
        caption = str(value.caption or "")
        if media is None:
            lacks = f"{name[:100]!r}, which has no file of at most {MAX_EACH >> 20} MiB"
            yield TrackedMedia(kind="file", name=name, content=b"", lacks=lacks)
        else:
            # Trackio names its files by chance.
            file_name = f"{name.rpartition('/')[2]}{path.suffix}"
            yield replace(media, name=name, caption=caption, file_name=file_name)


def of_summary_image(tag: Any, image: Any, layout: str) -> Iterator[TrackedMedia]:
    """The images that `add_image` and `add_images` are given, with dimensions in the order of `layout`."""
    if is_tensor(image):
        image = image.detach()
        image = (image.float() if image.is_floating_point() else image).cpu().numpy()
    pixels, order = np.asarray(image), layout.upper()
    if pixels.dtype.kind not in "biuf" or pixels.ndim != len(order) or set(order) - set("NCHW"):
        return
    pixels = np.transpose(pixels, [order.index(axis) for axis in "NHWC" if axis in order])
    for single in pixels[:MAX_IN_CALL] if "N" in order else [pixels]:
        yield TrackedMedia(kind="image", name=str(tag), content=image_content(single))


def of_image(name: Any, image: Any) -> Iterator[TrackedMedia]:
    """An image of any kind that `Run.log_image` takes."""
    yield TrackedMedia(kind="image", name=str(name), content=image_content(image))


def of_text(tag: Any, text: Any) -> TrackedMedia:
    """The text that `add_text` is given."""
    return TrackedMedia(kind="text", name=str(tag), content=text_content(text)[0])


def of_file(path: Any, folder: str | None) -> TrackedMedia | None:
    """A file that a tracker keeps: an image, a short text, or any other; None if it is too large or empty."""
    local = Path(os.fspath(path))
    if not local.is_file() or not 0 < local.stat().st_size <= MAX_EACH:
        return None
    body = local.read_bytes()
    name = f"{folder.strip('/')}/{local.name}" if folder else local.name
    kind: MediaKind = "file"
    if is_image(body):
        kind = "image"
    elif local.suffix.lower() in TEXT_ENDINGS and len(body) <= TEXT_BYTES and _is_text(body):
        kind = "text"
    return TrackedMedia(kind=kind, name=name[-NAME_LENGTH:], content=body, file_name=local.name)


def _is_text(body: bytes) -> bool:
    try:
        return "\0" not in body.decode()
    except UnicodeDecodeError:
        return False


Take = Callable[[], Iterator[TrackedMedia]]
"""Makes media of what a tracker was given."""
