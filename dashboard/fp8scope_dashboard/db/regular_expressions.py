"""Match texts with regular expressions that people write, by PostgreSQL and within a time.

Python's `re` holds the interpreter while it matches, and some expressions take it longer than anybody lives.
PostgreSQL matches most in linear time, and its statements end after a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.db import DataError, OperationalError, connection, transaction

MILLISECONDS: Final = 250
MAX_LENGTH: Final = 200


class PatternError(ValueError):
    """The expression cannot be used; the message says why."""


def matching(texts: Sequence[str], pattern: str) -> list[str]:
    """The texts in which a regular expression of PostgreSQL matches, in their order.

    Raises:
        PatternError: it is too long, no regular expression, or takes longer than MILLISECONDS.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"A regular expression has at most {MAX_LENGTH} characters.")
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('statement_timeout')")
            before = cursor.fetchone()[0]
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(MILLISECONDS)])
            cursor.execute(
                "SELECT item FROM unnest(%s::text[]) WITH ORDINALITY AS listed(item, number)"
                " WHERE item ~ %s ORDER BY number",
                [list(texts), pattern],
            )
            matched = [item for (item,) in cursor.fetchall()]
            # The transaction may be a part of a larger one, which has its own limit.
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [before])
    except DataError as error:
        reason = str(error).strip().splitlines()[0].removeprefix("invalid regular expression: ")
        raise PatternError(f"This is no regular expression: {reason}.") from error
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", "") != "57014":
            raise
        raise PatternError("The regular expression takes too long. Write a simpler one.") from error
    return matched
