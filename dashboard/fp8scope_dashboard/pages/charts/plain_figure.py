"""A figure of dictionaries, as the browser gets it, which is read like plotly's but has none of its checks.

Plotly's objects look up a validator for each property that is read, and copy each array to write JSON. With
many lines that takes longer than all the rest of a page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
import plotly.graph_objects as go
from numpy.typing import NDArray

# Parts of a figure that have parts of their own: where one is missing, all of its parts are None.
PARTS: Final = frozenset(
    {"colorbar", "error_y", "font", "legend", "line", "margin", "marker", "tickfont", "title"}
)
# Lists of parts; empty where they are missing.
LISTS: Final = frozenset({"annotations", "shapes", "tickformatstops"})
# Values that plotly's script expects as they are.
AS_THEY_ARE: Final = frozenset({"layer", "range"})
# The names that the script has for types of numbers.
TYPES: Final[Mapping[str, str]] = {
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "float32": "f4",
    "float64": "f8",
}
# The narrower types in which the script can read whole numbers.
NARROWER: Final[Mapping[str, Sequence[str]]] = {
    "int64": ("int8", "int16", "int32"),
    "uint64": ("uint8", "uint16", "uint32"),
}
# So that no text in a script element ends it.
ESCAPES: Final = (
    ("<", "\\u003c"),
    (">", "\\u003e"),
    ("/", "\\u002f"),
    ("\u2028", "\\u2028"),
    ("\u2029", "\\u2029"),
)


class Part:
    """A part of a figure to read: `part.line.color`, or None where there is none."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        value = self._values.get(name)
        if isinstance(value, dict):
            return value if name == "meta" else Part(value)
        if name in LISTS:
            return tuple(Part(part) for part in value or ())
        if isinstance(value, list):
            return tuple(value)
        return NOTHING if value is None and self._is_part(name) else value

    def _is_part(self, name: str) -> bool:
        return name in PARTS

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


class Layout(Part):
    """The layout of a figure. Its axes are parts, while that of a trace is a name."""

    __slots__ = ()

    def _is_part(self, name: str) -> bool:
        return name in PARTS or name.startswith(("xaxis", "yaxis"))


NOTHING: Final = Part({})


class PlainFigure:
    """Traces and a layout: dictionaries of plotly's properties that are right, which tests check."""

    def __init__(self, traces: list[dict[str, Any]], layout: dict[str, Any]) -> None:
        self._traces, self._layout = traces, layout
        self.data = tuple(map(Part, traces))
        self.layout = Layout(layout)

    def update_part(self, name: str, **values: Any) -> None:
        """Change properties of a part of the layout, such as its margin or an axis."""
        self._layout[name] = {**(self._layout.get(name) or {}), **values}

    def to_json(self) -> str:
        """The figure for plotly's script."""
        document = {"data": [_jsonable(trace) for trace in self._traces], "layout": _jsonable(self._layout)}
        text = orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()
        for character, escape in ESCAPES:
            text = text.replace(character, escape)
        return text

    def editable(self) -> go.Figure:
        """A copy as plotly's object, for what is only added to few figures."""
        return go.Figure(data=self._traces, layout=self._layout, _validate=False)


AnyFigure: TypeAlias = go.Figure | PlainFigure


def readable(figure: AnyFigure) -> PlainFigure:
    """The figure as one that is fast to read."""
    if isinstance(figure, PlainFigure):
        return figure
    return PlainFigure(
        [trace.to_plotly_json() for trace in figure.data], dict(figure.layout.to_plotly_json())
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, dict):
        return {name: part if name in AS_THEY_ARE else _jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return value


def _array(values: NDArray[Any]) -> Any:
    """Numbers as the bytes that the script reads without parsing; other values as a list."""
    if values.size and (kinds := NARROWER.get(str(values.dtype))):
        low, high = int(values.min()), int(values.max())
        fitting = (kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        values = values.astype(next(fitting, values.dtype))
    kind = TYPES.get(str(values.dtype))
    if kind is None or not values.size:
        return values.tolist()
    document = {"dtype": kind, "bdata": base64.b64encode(values.tobytes()).decode()}
    return document if values.ndim == 1 else {**document, "shape": str(values.shape)[1:-1]}
