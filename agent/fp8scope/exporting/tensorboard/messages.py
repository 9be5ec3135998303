"""Messages of TensorBoard's event files in the encoding of protocol buffers.

The numbers are those of the fields in tensorboard/compat/proto (event, summary, tensor) and
tensorboard/plugins/hparams (plugin_data, api).
"""

from collections.abc import Mapping
from typing import Final

from fp8scope.binary.encoding import field_bytes, field_double, field_number, field_text

DT_FLOAT, DT_STRING = 1, 7
SCALAR_CLASS, TENSOR_CLASS = 1, 2
SUCCESS, FAILURE, RUNNING = 1, 2, 3
HPARAM_TYPES: Final[Mapping[type, int]] = {str: 1, bool: 2, float: 3, int: 3}
Setting = bool | int | float | str


def metadata(plugin: str, content: bytes = b"", data_class: int = 0) -> bytes:
    """The SummaryMetadata of a plugin."""
    data = field_text(1, plugin) + (field_bytes(2, content) if content else b"")
    return field_bytes(1, data) + (field_number(4, data_class) if data_class else b"")


def event(wall_time: float, step: int, value: bytes) -> bytes:
    """An Event with one summary value."""
    return field_double(1, wall_time) + field_number(2, step) + field_bytes(5, field_bytes(1, value))


def version_event(wall_time: float) -> bytes:
    """The first Event of a file."""
    return field_double(1, wall_time) + field_text(3, "brain.Event:2")


def text_value(tag: str, text: str) -> bytes:
    """A summary value of the text plugin, in Markdown."""
    tensor = field_number(1, DT_STRING) + field_bytes(2, b"") + field_text(8, text)
    return (
        field_text(1, tag)
        + field_bytes(9, metadata("text", data_class=TENSOR_CLASS))
        + field_bytes(8, tensor)
    )


def hparam_values(
    group: str, began: float, ended: float | None, status: int, settings: Mapping[str, Setting]
) -> list[bytes]:
    """Summary values with the settings of a run for the plugin hparams: the session's start and end."""
    entries = b"".join(
        field_bytes(1, field_text(1, name) + field_bytes(2, _setting(value)))
        for name, value in settings.items()
    )
    start = entries + field_text(4, group) + field_double(5, began)
    end = field_number(1, status) + (b"" if ended is None else field_double(2, ended))
    infos = b"".join(field_bytes(4, _info(name, value)) for name, value in settings.items())
    return [
        _hparams("_hparams_/experiment", field_bytes(2, field_double(3, began) + infos)),
        _hparams("_hparams_/session_start_info", field_bytes(3, start)),
        _hparams("_hparams_/session_end_info", field_bytes(4, end)),
    ]


def _info(name: str, value: Setting) -> bytes:
    return field_text(1, name) + field_number(4, HPARAM_TYPES[type(value)])


def _setting(value: Setting) -> bytes:
    """A google.protobuf.Value. A whole number is a float64 there."""
    if isinstance(value, bool):
        return field_number(4, int(value))
    return field_text(3, value) if isinstance(value, str) else field_double(2, float(value))


def _hparams(tag: str, content: bytes) -> bytes:
    tensor = field_number(1, DT_FLOAT) + field_bytes(2, b"")
    return field_text(1, tag) + field_bytes(9, metadata("hparams", content)) + field_bytes(8, tensor)
