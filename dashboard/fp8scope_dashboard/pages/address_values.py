"""Values in addresses and forms, which are user input: None or nothing for a text that is none."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final
from uuid import UUID

# A number of so many digits fits into the bigint of PostgreSQL.
MAX_DIGITS: Final = 18


def whole_number(text: str, most_digits: int = MAX_DIGITS) -> int | None:
    """A whole number from 0 on, in ASCII digits; None for other texts and for more digits."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most_digits else None


def uuid_in(text: str) -> UUID | None:
    """An id; None for other texts."""
    try:
        return UUID(text)
    except ValueError:
        return None


def uuids_in(texts: Iterable[str], most: int) -> set[UUID]:
    """The ids among the first `most` texts."""
    return {address for text in islice(texts, most) if (address := uuid_in(text)) is not None}
