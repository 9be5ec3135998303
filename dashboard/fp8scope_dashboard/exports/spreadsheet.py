"""Text in a CSV file that no spreadsheet program takes for a formula.

A cell is a formula when it begins with one of = + - @, a tab or a carriage return. Names come from training
scripts, and a program that splits at semicolons (many languages' default) also splits inside our cells. Both
functions can be undone: JSON by any reader of JSON, a header by `fp8scope import`.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Where a cell may begin in somebody's program, with a formula's first character or with what we put there.
_BEGINNING = re.compile(r"(?:^|(?<=[,;\t\r\n]))(?='*[=+\-@\t\r])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SEPARATORS = str.maketrans({",": "\\u002c", ";": "\\u003b"})


def json_text(document: Any) -> str:
    """JSON on one line in whose strings no separator stands, so that none of them begins a cell."""
    return escape_json(json.dumps(document))


def escape_json(text: str) -> str:
    """The same JSON, with separators inside its strings as \\u escapes."""
    return _STRING.sub(lambda match: match[0].translate(_SEPARATORS), text)


def safe_header(name: str) -> str:
    """A column's name with an apostrophe before each place that could begin a formula."""
    return _BEGINNING.sub("'", name)
