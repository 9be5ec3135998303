"""Objects of answers as dataclasses. Fields that a newer server adds are left out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from typing import Any, TypeVar

from fp8scope.client.connection import ClientError

T = TypeVar("T")
OLDER = "The answer lacks a field: the server is older than this client."
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The strings of docs/wire.md for values that JSON has no number for."""


def read_object(kind: type[T], answer: Mapping[str, Any], **changed: Any) -> T:
    """Make a dataclass of the fields of an answer; those in `changed` are given.

    Raises:
        ClientError: the answer lacks a field, as that of an older server does.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    required = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    missing = [name for name in required if name not in answer and name not in changed]
    if missing:
        raise ClientError(OLDER)
    values = {name: _plain(answer[name]) for name in names if name in answer and name not in changed}
    return kind(**values, **changed)


def read_objects(kind: type[T], answers: Sequence[Mapping[str, Any]]) -> tuple[T, ...]:
    """Make a dataclass of each answer."""
    return tuple(read_object(kind, answer) for answer in answers)


def _plain(value: Any) -> Any:
    """Lists as tuples, so that what is frozen cannot change."""
    return tuple(value) if isinstance(value, list) else value


def number_of(value: float | str | None) -> float | None:
    """A number of an answer, which writes NaN and infinities as strings; None for None."""
    if value is None:
        return None
    return NOT_FINITE[value] if isinstance(value, str) and value in NOT_FINITE else float(value)


def time_of(text: str | None) -> datetime | None:
    """A time of an answer; None for None."""
    return None if text is None else datetime.fromisoformat(text.replace("Z", "+00:00"))
