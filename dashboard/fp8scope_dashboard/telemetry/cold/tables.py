"""The tables whose bodies are moved into the cold store.

Scalars and the steps of rows stay: they are few, and lists, verdicts and roll-ups need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ColdTable:
    """A table with the columns `body` and `location`.

    Attributes:
        keys: the columns of its primary key after the run, with their types, in an order in which neighbours
            are read together.
        where: the condition of rows that are moved.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    where: str = "true"

    @property
    def key_names(self) -> str:
        """The columns of the key, with commas between them."""
        return ", ".join(name for name, _ in self.keys)

    @property
    def key_arrays(self) -> str:
        """One parameter for each column of the key: an array of its values."""
        return ", ".join(f"%({name})s::{kind}[]" for name, kind in self.keys)

    def same_key(self, other: str) -> str:
        """The condition that a row, `stored`, has the key of a row of another table."""
        return " AND ".join(f"stored.{name} = {other}.{name}" for name, _ in self.keys)


TABLES: Final = (
    ColdTable(
        "telemetry_tile",
        (("name", "text"), ("tile", "int"), ("writer", "uuid"), ("seq", "bigint")),
        "name LIKE 'tensor:%%'",
    ),
    ColdTable("telemetry_histogram", (("writer", "uuid"), ("seq", "bigint"))),
)
