"""The meaning of an event: values of tags, configuration, and the beginning of a session.

The numbers of the fields are those of event.proto, summary.proto, tensor.proto and types.proto of TensorFlow,
and of the hparams plugin of TensorBoard. Values are float32 as `simple_value`, or a tensor of one element.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

from fp8scope.binary.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    ProtobufError,
    double,
    fields,
    signed,
    single,
    text,
    varints,
)

WALL_TIME, STEP, SUMMARY, SESSION_LOG = 1, 2, 5, 7
SESSION_START: Final = 1
MAX_TAG: Final = 1_000
"""Bytes. A value with a longer tag is left out."""
MAX_TEXT: Final = 1_000
"""Characters of a text that may be a part of the configuration."""
HPARAMS: Final = "_hparams_/session_start_info"
TEXT_SUFFIX: Final = "/text_summary"
SCALARS, TEXTS, IMAGES, HPARAMS_PLUGIN = "scalars", "text", "images", "hparams"
IMAGE, ENCODED_IMAGE = 4, 4
MAX_STRINGS: Final = 18
"""Elements of a tensor of strings that are read: two numbers, and as many images as a run has at a step."""
DATA_CLASS_SCALAR: Final = 1
_FORMATS: Final[Mapping[int, str]] = {
    1: "f", 2: "d", 3: "i", 4: "B", 5: "h", 6: "b", 9: "q", 10: "?", 17: "H", 19: "e", 22: "I", 23: "Q"
}  # fmt: skip
"""By the number of a dtype, how one element is stored in `tensor_content`."""
BFLOAT16: Final = 14
STRING: Final = 7
_FLOAT_VAL, _DOUBLE_VAL, _STRING_VAL, _HALF_VAL = 5, 6, 8, 13
_INTEGER_VALS: Final = (7, 10, 11, 16, 17)


@dataclass(slots=True)
class TaggedValue:
    """A value of a tag."""

    tag: str
    value: float


@dataclass(slots=True, frozen=True)
class TaggedMedia:
    """An image or a text of a tag, as it was written."""

    tag: str
    kind: Literal["image", "text"]
    content: bytes


@dataclass(slots=True, kw_only=True)
class LoggedEvent:
    """An event: its values in the order of the file.

    Attributes:
        wall_time: seconds since 1970.
        is_start: a session begins: what is stored from this step on is void.
        config: entries of the configuration; `is_hparams`: they are hyperparameters, and not texts.
    """

    wall_time: float = 0.0
    step: int = 0
    is_start: bool = False
    values: list[TaggedValue] = field(default_factory=list)
    media: list[TaggedMedia] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    is_hparams: bool = False


class EventReader:
    """Reads the events of one file. Plugins are named with the first value of a tag only.

    Attributes:
        unreadable: the records that are no event.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self._plugins: dict[str, tuple[str, int]] = {}

    def read(self, record: bytes) -> LoggedEvent | None:
        """Return the event of a record, or None if it is none."""
        try:
            return self._event(record)
        except (ProtobufError, struct.error, RecursionError):
            self.unreadable += 1
            return None

    def _event(self, data: bytes) -> LoggedEvent:
        event = LoggedEvent()
        summaries = []
        for number, kind, at, end in fields(data):
            if number == WALL_TIME and kind == FIXED64:
                event.wall_time = double(data, at)
            elif number == STEP and kind == VARINT:
                event.step = signed(at)
            elif number == SUMMARY and kind == BYTES:
                summaries.append((at, end))
            elif number == SESSION_LOG and kind == BYTES:
                event.is_start = _varint_in(data, at, end, 1) == SESSION_START
        for begin, behind in summaries:
            for number, kind, at, end in fields(data, begin, behind):
                if number == 1 and kind == BYTES:
                    self._value(event, data, at, end)
        return event

    def _value(self, event: LoggedEvent, data: bytes, at: int, end: int) -> None:
        tag, simple, tensor, metadata, image = "", None, None, None, None
        for number, kind, start, behind in fields(data, at, end):
            if number == 1 and kind == BYTES:
                if behind - start > MAX_TAG:
                    return
                tag = text(data, start, behind)
            elif number == 2 and kind == FIXED32:
                simple = single(data, start)
            elif number == IMAGE and kind == BYTES:
                image = (start, behind)
            elif number == 8 and kind == BYTES:
                tensor = (start, behind)
            elif number == 9 and kind == BYTES:
                metadata = (start, behind)
        if simple is not None:
            event.values.append(TaggedValue(tag, simple))
            return
        if image is not None:
            for first, last in islice(_messages(data, *image, ENCODED_IMAGE), 1):
                event.media.append(TaggedMedia(tag, "image", data[first:last]))
            return
        plugin, data_class, content = "", 0, None
        if metadata is not None:
            plugin, data_class, content = _metadata(data, *metadata)
            if len(self._plugins) < 100_000:
                self._plugins.setdefault(tag, (plugin, data_class))
        plugin, data_class = self._plugins.get(tag, (plugin, data_class))
        if plugin == HPARAMS_PLUGIN and content is not None and tag == HPARAMS:
            event.config.update(_hparams(data, *content))
            event.is_hparams = True
        elif tensor is not None:
            self._tensor(event, tag, plugin, data_class, _Tensor(data, *tensor))

    @staticmethod
    def _tensor(event: LoggedEvent, tag: str, plugin: str, data_class: int, tensor: "_Tensor") -> None:
        if plugin == SCALARS or data_class == DATA_CLASS_SCALAR:
            value = tensor.number()
            if value is not None:
                event.values.append(TaggedValue(tag, value))
        elif plugin == TEXTS:
            name, words = tag.removesuffix(TEXT_SUFFIX), tensor.words()
            if words is not None:
                event.config[name] = plain_value(words)
            event.media += [TaggedMedia(name, "text", words) for words in tensor.strings()]
        elif plugin == IMAGES:
            # The first two are the width and the height.
            event.media += [TaggedMedia(tag, "image", body) for body in tensor.strings()[2:]]


def plain_value(words: str) -> Any:
    """A text as a number, a truth value or itself, so that searches compare numbers."""
    if words in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[words]
    if "_" in words:
        # Python reads 1_0 as a number; who logs it means a name.
        return words
    try:
        if words.lstrip("-").isdecimal() and len(words) <= 18:
            return int(words)
        number = float(words)
    except ValueError:
        return words
    return number if math.isfinite(number) else words


def _varint_in(data: bytes, at: int, end: int, wanted: int) -> int:
    """The integer field `wanted` of a message; 0 if it has none."""
    for number, kind, value, _ in fields(data, at, end):
        if number == wanted and kind == VARINT:
            return value
    return 0


def _metadata(data: bytes, at: int, end: int) -> tuple[str, int, tuple[int, int] | None]:
    """The plugin, the class of the data, and where the content of the plugin is."""
    plugin, data_class, content = "", 0, None
    for number, kind, start, behind in fields(data, at, end):
        if number == 1 and kind == BYTES:
            for inner, inner_kind, first, last in fields(data, start, behind):
                if inner == 1 and inner_kind == BYTES:
                    plugin = text(data, first, min(last, first + 64))
                elif inner == 2 and inner_kind == BYTES:
                    content = (first, last)
        elif number == 4 and kind == VARINT:
            data_class = start
    return plugin, data_class, content


def _messages(data: bytes, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """The positions of the fields `wanted` of a message."""
    for number, kind, start, behind in fields(data, at, end):
        if number == wanted and kind == BYTES:
            yield start, behind


def _hparams(data: bytes, at: int, end: int) -> dict[str, Any]:
    """The hyperparameters of a session: a map of names to google.protobuf.Value."""
    config: dict[str, Any] = {}
    for session in _messages(data, at, end, 3):
        for entry in _messages(data, *session, 1):
            name, value = "", None
            for number, kind, start, behind in fields(data, *entry):
                if number == 1 and kind == BYTES:
                    name = text(data, start, min(behind, start + MAX_TAG))
                elif number == 2 and kind == BYTES:
                    value = _plain(data, start, behind)
            if name:
                config[name] = value
    return config


def _plain(data: bytes, at: int, end: int) -> Any:
    """A google.protobuf.Value that is a number, a text or a truth value; None for others."""
    for number, kind, start, behind in fields(data, at, end):
        if number == 2 and kind == FIXED64:
            value = double(data, start)
            is_whole = math.isfinite(value) and value.is_integer() and abs(value) < 2**53
            return int(value) if is_whole else value if math.isfinite(value) else str(value)
        if number == 3 and kind == BYTES:
            return text(data, start, min(behind, start + MAX_TEXT))
        if number == 4 and kind == VARINT:
            return bool(start)
    return None


class _Tensor:
    """A TensorProto. Its parts are found first, because its dtype may come after its values."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data = data
        self._whole = (at, end)
        self._dtype = 0
        self._content: tuple[int, int] | None = None
        self._values: list[tuple[int, int, int, int]] = []
        for number, kind, start, behind in fields(data, at, end):
            if number == 1 and kind == VARINT:
                self._dtype = start
            elif number == 4 and kind == BYTES:
                self._content = (start, behind)
            elif number >= _FLOAT_VAL and len(self._values) < 2:
                self._values.append((number, kind, start, behind))

    def number(self) -> float | None:
        """Its element; None if it has not exactly one, or a complex one or a text."""
        if self._content is not None and self._content[0] < self._content[1]:
            return self._stored(*self._content)
        if not self._values:
            # Writers leave out values that are zero.
            return 0.0 if self._dtype in _FORMATS or self._dtype == BFLOAT16 else None
        return None if len(self._values) > 1 else self._listed(*self._values[0])

    def _stored(self, at: int, end: int) -> float | None:
        layout = _FORMATS.get(self._dtype)
        if layout is not None and end - at == struct.calcsize(layout):
            return float(struct.unpack_from("<" + layout, self._data, at)[0])
        if self._dtype == BFLOAT16 and end - at == 2:
            return _bfloat16(int.from_bytes(self._data[at:end], "little"))
        return None

    def _listed(self, number: int, kind: int, at: int, end: int) -> float | None:
        """An element in a list of its type, packed or not."""
        data = self._data
        if number == _FLOAT_VAL and end - at == 4:
            return single(data, at)
        if number == _DOUBLE_VAL and end - at == 8:
            return double(data, at)
        if number not in (*_INTEGER_VALS, _HALF_VAL) or kind not in (VARINT, BYTES):
            return None
        values = [at] if kind == VARINT else list(islice(varints(data, at, end), 2))
        if len(values) != 1:
            return None
        if number == _HALF_VAL:
            bits = values[0] & 0xFFFF
            if self._dtype == BFLOAT16:
                return _bfloat16(bits)
            return float(struct.unpack("<e", bits.to_bytes(2, "little"))[0])
        return float(values[0] if self._dtype == 23 else signed(values[0]))

    def strings(self) -> list[bytes]:
        """Its first elements, if they are strings."""
        if self._dtype != STRING:
            return []
        listed = islice(_messages(self._data, *self._whole, _STRING_VAL), MAX_STRINGS)
        return [self._data[at:end] for at, end in listed]

    def words(self) -> str | None:
        """Its text, if that is one short line."""
        if self._dtype != STRING or len(self._values) != 1:
            return None
        number, kind, at, end = self._values[0]
        if number != _STRING_VAL or kind != BYTES or end - at > 4 * MAX_TEXT:
            return None
        words = text(self._data, at, end)
        return words if len(words) <= MAX_TEXT and words.isprintable() else None


def _bfloat16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
