"""A line of text as a terminal would leave it."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# In order: sequences with a command (CSI), strings such as titles and links (OSC, DCS, SOS, PM, APC) with or
# without their end, other sequences, single control characters, and text.
_PART: Final = re.compile(
    r"(?:\x1b\[|\x9b)(?P<arguments>[0-?]*)[ -/]*(?P<command>[@-~])?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
    r"|(?P<control>[\x00-\x08\x0b-\x1f\x7f-\x9f])"
    r"|(?P<text>[^\x00-\x08\x0b-\x1f\x7f-\x9f]+)"
)


def as_printed(line: str) -> str:
    """The line without control characters and escape sequences, and never longer.

    Carriage returns, backspaces and erasures are carried out; colours, titles, links and other moves of the
    cursor are left out. Tabs and newlines are kept.
    """
    if _CONTROL.search(line) is None:
        return line
    shown: list[str] = []
    column = 0
    for part in _PART.finditer(line):
        if (text := part["text"]) is not None:
            shown[column : column + len(text)] = text
            column += len(text)
        elif part["command"] == "K":
            column = _erase(shown, column, part["arguments"])
        elif part["control"] == "\r":
            column = 0
        elif part["control"] == "\b":
            column = max(0, column - 1)
    return "".join(shown)


def _erase(shown: list[str], column: int, how: str) -> int:
    """Erase to the end of the line, to its beginning (1) or all of it (2). Returns the cursor's column."""
    if how in ("", "0"):
        del shown[column:]
    elif how == "1":
        shown[:column] = " " * min(column, len(shown))
    elif how == "2":
        shown[:] = " " * min(column, len(shown))
    return min(column, len(shown))
