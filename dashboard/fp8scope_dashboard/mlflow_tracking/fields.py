"""Fields of requests, with bounds. MLflow's clients send integers as numbers or as texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from fp8scope_dashboard.mlflow_tracking.errors import MlflowError

Body = Mapping[str, Any]

MAX_KEY: Final = 250
MAX_PARAM: Final = 6_000
MAX_TAG: Final = 8_000
MAX_NAME: Final = 500
MAX_INT: Final = 2**62
NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def invalid(name: str, value: Any, reason: str) -> MlflowError:
    """The refusal of a value, which begins as MLflow's own: some clients look for that."""
    shown = json.dumps(value) if isinstance(value, str) else str(value)
    return MlflowError(f"Invalid value {shown[:100]} for parameter '{name}' supplied: {reason}.")


def text(body: Body, name: str, most: int = MAX_NAME, *, default: str | None = None) -> str:
    """A text of 1 to `most` characters; with a default, it may be absent or empty.

    Raises MlflowError if it is missing, too long, or no text.
    """
    value = body.get(name)
    if value in (None, ""):
        if default is not None:
            return default
        raise MlflowError(f"Missing value for required parameter '{name}'.")
    if not isinstance(value, str):
        raise invalid(name, value, "it must be a text")
    if len(value) > most:
        raise MlflowError(f"'{name}' has {len(value)} characters; at most {most} are allowed.")
    if "\0" in value:
        raise MlflowError(f"'{name}' has the character NUL.")
    return value


def integer(body: Body, name: str, *, low: int, high: int = MAX_INT, default: int | None = None) -> int:
    """An integer from `low` to `high`. Raises MlflowError if it is none, or missing without a default."""
    value = body.get(name)
    if value is None or value == "":
        if default is not None:
            return default
        raise MlflowError(f"Missing value for required parameter '{name}'.")
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        raise invalid(name, value, "it must be an integer") from None
    if not low <= number <= high:
        raise invalid(name, number, f"it must be from {low} to {high}")
    return number


def number(body: Body, name: str) -> float:
    """A number, NaN and infinities included. Raises MlflowError if it is none."""
    value = body.get(name)
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise invalid(name, value, "it must be a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise invalid(name, value, "it must be a number") from None


def texts(body: Body, name: str, most: int, refusal: str) -> list[str]:
    """A list of at most `most` texts; one of a query may stand alone.

    Raises MlflowError if there is none, or something else; `refusal` is the message for too many.
    """
    value = body.get(name) or []
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise invalid(name, value, "it must be a list of texts")
    if not listed:
        raise MlflowError(f"Missing value for required parameter '{name}'.")
    if len(listed) > most:
        raise MlflowError(f"{refusal} Received {len(listed)} {name}.")
    return listed


def objects(body: Body, name: str, most: int) -> list[Body]:
    """A list of at most `most` objects; absent, it is empty. Raises MlflowError if it is none."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise invalid(name, value, "it must be a list of objects")
    if len(value) > most:
        raise MlflowError(f"'{name}' has {len(value)} entries; at most {most} are allowed in a request.")
    return value


def pairs(body: Body, name: str, most: int, longest: int) -> dict[str, str]:
    """A list of {"key", "value"} as a dictionary. Raises MlflowError if it is none."""
    return {
        text(entry, "key", MAX_KEY): text(entry, "value", longest, default="")
        for entry in objects(body, name, most)
    }
