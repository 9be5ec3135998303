"""What the glossary is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A word, what it is, and how to read it."""

    title: str
    definition: str
    reading: str = ""
