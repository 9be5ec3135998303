"""Texts and documents of files as numbers, times, names and bounded mappings."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.limits import MAX_DEPTH, MAX_DOCUMENT, MAX_ENTRIES, MAX_TEXT, MIB
from fp8scope.importing.model import UnreadableError

MAX_STEP: Final = 2**62
FIRST_TIME: Final = 946_684_800.0
LAST_TIME: Final = 7_258_118_400.0
"""2000-01-01 and 2200-01-01 in seconds since 1970; a clock outside of them was wrong."""
_NUMBER_WORDS: Final = {
    "nan": math.nan,
    "inf": math.inf,
    "infinity": math.inf,
    "+infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}


def number_of(value: Any) -> float | None:
    """A number, a truth value, or the text of NaN or infinity as a float; None for anything else."""
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, str) and len(value) <= 9:
        return _NUMBER_WORDS.get(value.lower())
    return None


def number_in(text: str) -> float | None:
    """A number that is written as text; None if it is none."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def step_of(value: Any) -> int | None:
    """A step as an integer from 0; None for anything else."""
    if isinstance(value, str):
        if len(value) > 32:
            return None
        value = int(value) if value.isdecimal() else number_in(value)
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            return None
        value = int(value)
    if isinstance(value, int) and 0 <= value <= MAX_STEP:
        return int(value)
    return None


def seconds_of(value: Any) -> float | None:
    """A time as seconds since 1970: of a number in s, ms, us or ns by its size, or of a text in ISO 8601.

    None for what is no time between 2000 and 2200.
    """
    if isinstance(value, str):
        number = None if value[4:5] == "-" else number_in(value)
        if number is None:
            return _seconds_in(value)
        value = number
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    for _ in range(3):
        if seconds > LAST_TIME:
            seconds /= 1e3
    return seconds if FIRST_TIME <= seconds <= LAST_TIME else None


def _seconds_in(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text.strip()[:40])
    except ValueError:
        return None
    try:
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError, OSError):
        return None
    return seconds if FIRST_TIME <= seconds <= LAST_TIME else None


def micros_of(value: Any) -> int | None:
    """A time as microseconds since 1970; None for what is none. See `seconds_of`."""
    seconds = seconds_of(value)
    return None if seconds is None else round(seconds * 1e6)


def iso_of(seconds: float) -> str:
    """A time in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse JSON. Raises UnreadableError with `what` if it is malformed or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnreadableError(f"{what} is not JSON: {reason[:200]}") from None


def read_json(path: Path, limit: int = MAX_DOCUMENT) -> Any:
    """Parse a file of JSON. Raises UnreadableError if it is larger than `limit`, or malformed."""
    return parse_json(read_bytes(path, limit), str(path))


def read_bytes(path: Path, limit: int = MAX_DOCUMENT) -> bytes:
    """Read a file. Raises UnreadableError if it is larger than `limit` bytes."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UnreadableError(f"{path} is larger than {limit // MIB} MiB, which is more than such a file has")
    return data


def mapping_of(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object; else an empty one."""
    return value if isinstance(value, dict) else {}


def flat_numbers(
    document: Mapping[Any, Any], separator: str = "/", depth: int = 0
) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a document; those of nested objects under names that are joined."""
    for name, value in document.items():
        number = number_of(value)
        if number is not None:
            yield str(name), number
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            for inner, nested in flat_numbers(value, separator, depth + 1):
                yield f"{name}{separator}{inner}", nested


def storable(value: Any, depth: int = 0) -> Any:
    """A value for a run's configuration: JSON within the bounds, without NUL; NaN and infinities as text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value[:MAX_TEXT].replace("\0", "").encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return (
            value
            if -(2**63) <= value < 2**63
            else str(value)[:MAX_TEXT]
            if value.bit_length() < 4000
            else "…"
        )
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        items = list(value.items())[:MAX_ENTRIES]
        return {storable(str(name)[:256]): storable(inner, depth + 1) for name, inner in items}
    if isinstance(value, list | tuple):
        return [storable(inner, depth + 1) for inner in value[:MAX_ENTRIES]]
    return str(value)[:MAX_TEXT].replace("\0", "")


def text_of(text: str) -> str:
    """A text in one line, without what is not printable."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text[:MAX_TEXT])
    return clean.encode("utf-8", "replace").decode().strip()


def from_text(text: str) -> Any:
    """The number or truth value that a parameter was before it became text; else the text."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if len(text) > 64 or not re.fullmatch(r"[-+0-9.eE]+", text):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def seed_of(config: Mapping[str, Any], *groups: str) -> int | None:
    """The seed, if a configuration or its first group of these names that has it says it."""
    for entries in (config, *(mapping_of(config.get(group)) for group in groups)):
        seed = entries.get("seed")
        if type(seed) is int and abs(seed) < 2**63:
            return seed
    return None
