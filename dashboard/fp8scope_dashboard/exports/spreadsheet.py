"""Escape text in CSV files so that spreadsheet programs do not take it for a formula.

A cell that begins with one of = + - @, a tab or a carriage return is a formula. Names come from training
scripts, and programs that split at semicolons (the default in many languages) also split inside our cells.
Both functions are reversible: JSON by any JSON parser, a header by `fp8scope import`.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Where a cell may begin in some program, followed by the first character of a formula or by our escape.
_BEGINNING = re.compile(r"(?:^|(?<=[,;\t\r\n]))(?='*[=+\-@\t\r])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SEPARATORS = str.maketrans({",": "\\u002c", ";": "\\u003b"})


def json_text(document: Any) -> str:
    """JSON on one line without separators in its strings, so that no string begins a cell."""
    return escape_json(json.dumps(document))


def escape_json(text: str) -> str:
    """The same JSON with the separators in its strings as \\u escapes."""
    return _STRING.sub(lambda match: match[0].translate(_SEPARATORS), text)


def safe_header(name: str) -> str:
    """A column's name with an apostrophe before each place that could begin a formula."""
    return _BEGINNING.sub("'", name)
