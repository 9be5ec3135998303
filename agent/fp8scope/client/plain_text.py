"""Texts of runs without the characters that a terminal, or another reader, would obey."""

import unicodedata

# Joins parts of letters and emoji; harmless, and needed.
JOINER, SELECTORS = "\u200d", range(0xFE00, 0xFE10)


def printable(text: object) -> str:
    """A text with every character that a terminal would obey written as an escape, such as \\x1b."""
    return "".join(map(_printable, str(text)))


def _printable(character: str) -> str:
    code = ord(character)
    if character.isprintable() or character == JOINER or code in SELECTORS:
        return character
    if unicodedata.category(character) == "Zs":
        return " "
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
