"""An entry of the glossary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A title, its definition, and how to read the value."""

    title: str
    definition: str
    reading: str = ""
