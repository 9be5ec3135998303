"""Aim's encoding of trees (aim/storage/encoding): a key is a path, a value is a type and its bytes.

A part of a path is a text in UTF-8, or FE and an integer of 8 bytes; FE, which is in no text, ends each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.importing.limits import MAX_DEPTH, MAX_ENTRIES
from fp8scope.importing.model import UnreadableError, Values
from fp8scope.importing.rocksdb_folder import Item

END: Final = b"\xfe"
INTEGER_KEY: Final = 10
"""Bytes of an integer in a path, with both FE."""
NONE, BOOL, INT, FLOAT, STRING, BYTES, ARRAY, OBJECT, CUSTOM = 0, 1, 2, 3, 4, 5, 6, 7, 15
_NUMBER: Final = np.dtype([("type", "u1"), ("bits", "<i8")])
Key = str | int


def encode_path(*parts: Key) -> bytes:
    """Return a path as the beginning of the keys below it."""
    encoded = (
        END + part.to_bytes(8, "big", signed=True) if isinstance(part, int) else part.encode("utf-8")
        for part in parts
    )
    return b"".join(part + END for part in encoded)


def decode_path(data: bytes) -> tuple[Key, ...]:
    """Return the parts of a path. Raises UnreadableError if it is malformed."""
    parts: list[Key] = []
    at = 0
    while at < len(data):
        if data[at : at + 1] == END:
            end = at + INTEGER_KEY - 1
            parts.append(int.from_bytes(data[at + 1 : end], "big", signed=True))
        else:
            end = data.find(END, at)
            try:
                parts.append(data[at:end].decode("utf-8"))
            except UnicodeError:
                raise UnreadableError("a key of the repository is malformed: it is no UTF-8") from None
        if data[end : end + 1] != END or end < at:
            raise UnreadableError("a key of the repository is malformed: it has no end")
        at = end + 1
    return tuple(parts)


def decode_value(data: bytes) -> Any:
    """Return a value: None, a truth value, number or text; None for bytes, and for what is malformed."""
    kind, content = data[:1], data[1:]
    if kind == bytes((BOOL,)):
        return content != b"\0"
    if kind == bytes((INT,)) and len(content) == 8:
        return int.from_bytes(content, "little", signed=True)
    if kind == bytes((FLOAT,)) and len(content) == 8:
        return float(np.frombuffer(content, "<f8")[0])
    if kind == bytes((STRING,)):
        return content.decode("utf-8", "replace")
    return None


class _List(dict[Key, Any]):
    """The entries of a list by their index."""


def decode_tree(items: Iterable[Item], skip: int) -> Any:
    """Return the value whose parts are these items: nested mappings and lists, bounded in depth and entries.

    `skip`: bytes that all keys begin with. Objects of Aim's own, such as images, are left out.
    """
    root: Any = {}
    custom: bytes | None = None
    for count, (key, value) in enumerate(items):
        if custom is not None and key.startswith(custom):
            continue
        if count >= MAX_ENTRIES:
            break
        path = decode_path(key[skip:])
        if value[:1] == bytes((CUSTOM,)) or not value:
            # Large values are stored elsewhere, and are empty here.
            custom = key
        elif len(path) <= MAX_DEPTH:
            root = _with(root, path, value)
    return _plain(root)


def _with(root: Any, path: Sequence[Key], data: bytes) -> Any:
    kinds: dict[int, Any] = {ARRAY: _List, OBJECT: dict}
    make = kinds.get(data[0])
    value = make() if make else decode_value(data)
    if not path:
        return value
    if not isinstance(root, dict):
        return root
    target = root
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            return root
        target = inner
    target.setdefault(path[-1], value)
    return root


def _plain(value: Any) -> Any:
    if isinstance(value, _List):
        return [_plain(value[index]) for index in sorted(value, key=lambda index: (str(type(index)), index))]
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True)
class NumberColumn:
    """Values by their keys: uint64[N] in ascending order, float64[N], and which are numbers, bool[N]."""

    keys: NDArray[np.uint64]
    values: Values
    numbers: NDArray[np.bool_]

    def at(self, keys: NDArray[np.uint64]) -> Values:
        """Return the values of some keys, NaN where there is none, float64[len(keys)]."""
        if np.array_equal(keys, self.keys):
            return self.values
        if not len(self.keys):
            return np.full(len(keys), np.nan)
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[index] == keys, self.values[index], np.nan)


def read_column(blocks: Iterator[Sequence[Item]], skip: int, limit: int) -> NumberColumn:
    """Return the numbers below a path; `skip` are the bytes of the path.

    Raises:
        UnreadableError: there are more than `limit`.
    """
    keys, values, numbers = [np.zeros(0, np.uint64)], [np.zeros(0)], [np.zeros(0, np.bool_)]
    count = 0
    for block in blocks:
        names, contents = zip(*block, strict=True)
        if set(map(len, names)) != {skip + INTEGER_KEY}:
            # The parts of an object that is no number.
            pairs = [item for item in block if len(item[0]) == skip + INTEGER_KEY]
            if not pairs:
                continue
            names, contents = zip(*pairs, strict=True)
        count += len(names)
        if count > limit:
            raise UnreadableError(f"the run has more than {limit:,} points")
        table = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)
        keys.append(table[:, skip + 1 : -1].copy().view(">u8").ravel().astype(np.uint64))
        decoded, present = _decoded(contents)
        values.append(decoded)
        numbers.append(present)
    return NumberColumn(np.concatenate(keys), np.concatenate(values), np.concatenate(numbers))


def _decoded(contents: Sequence[bytes]) -> tuple[Values, NDArray[np.bool_]]:
    """Values as numbers, NaN for what is none, and which are numbers."""
    if set(map(len, contents)) != {_NUMBER.itemsize}:
        contents = [data if len(data) == _NUMBER.itemsize else _widened(data) for data in contents]
    table = np.frombuffer(b"".join(contents), _NUMBER)
    bits = np.ascontiguousarray(table["bits"])
    present = (table["type"] == INT) | (table["type"] == FLOAT)
    values = np.where(table["type"] == FLOAT, bits.view(np.float64), bits.astype(np.float64))
    return np.where(present, values, np.nan), present


def _widened(data: bytes) -> bytes:
    """A value of another length as one of 9 bytes: truth values are integers, all others are no numbers."""
    if data[:1] == bytes((BOOL,)):
        return bytes((INT, data[1:] != b"\0", *bytes(7)))
    return bytes(_NUMBER.itemsize)
