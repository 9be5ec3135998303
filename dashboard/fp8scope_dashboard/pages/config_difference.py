"""Which entries of two configurations differ. Pure functions of JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

# Entries of one configuration; further ones are left out, and counted.
MOST_ENTRIES: Final = 2_000
VALUE_LENGTH: Final = 300
DEEPEST: Final = 20
ABSENT: Final = "–"


@dataclass(frozen=True)
class Entry:
    """One entry: its dotted name, and its value in each of the two. ABSENT if one does not have it."""

    name: str
    mine: str
    theirs: str = ABSENT


@dataclass(frozen=True)
class Difference:
    """The entries that differ, those that are equal, and how many are left out because there are too many."""

    differing: list[Entry]
    equal: list[Entry]
    left_out: int = 0


def difference_of(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference:
    """Compare two configurations entry by entry. 1 and 1.0 are equal; 1 and "1" are not."""
    ours, others = flattened(mine), flattened(theirs)
    names = sorted(set(ours) | set(others))
    differing: list[Entry] = []
    equal: list[Entry] = []
    for name in names[:MOST_ENTRIES]:
        here, there = ours.get(name, _MISSING), others.get(name, _MISSING)
        entry = Entry(name, _written(here), _written(there))
        (equal if _is_same(here, there) else differing).append(entry)
    return Difference(differing, equal, max(0, len(names) - MOST_ENTRIES))


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries by dotted name. Lists are values; so is what is nested too deeply, and an empty object."""
    return dict(_entries("", config, 0))


_MISSING: Final = object()


def _entries(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and depth < DEEPEST:
        for key in value:
            yield from _entries(f"{name}.{key}" if name else str(key), value[key], depth + 1)
    elif name:
        yield name, value


def _is_same(here: Any, there: Any) -> bool:
    # True == 1 in Python, but not in a configuration.
    return bool(isinstance(here, bool) == isinstance(there, bool) and here == there)


def _written(value: Any) -> str:
    if value is _MISSING:
        return ABSENT
    is_plain = isinstance(value, str) and value.strip() == value != ""
    text = value if is_plain else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 1]}…"
