"""The order in which people expect names with numbers."""

import re
from typing import Final

NUMBER: Final = re.compile(r"(\d+)")


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts numbers in names by their value: blocks.2 before blocks.10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in NUMBER.split(name) if part
    )
