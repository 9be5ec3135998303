"""MLflow's filters and orders: comparisons that are joined by AND, and keys to sort by."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import NOT_FINITE

MAX_FILTER: Final = 8_000
MAX_CONDITIONS: Final = 50


@dataclass(frozen=True)
class FilterWords:
    """The words of filters: kinds by name, attributes by name, and those attributes that are numbers."""

    kinds: Mapping[str, str]
    attributes: Mapping[str, str]
    numbers: Collection[str]

    def is_number(self, kind: str, name: str) -> bool:
        """Return whether something is compared as a number, and not as a text."""
        return kind == "metrics" or (kind == "info" and name in self.numbers)


_OF_ATTRIBUTES: Final = dict.fromkeys(("attribute", "attributes", "attr", "run"), "info")
_OF_TAGS: Final = dict.fromkeys(("tag", "tags"), "tags")
RUNS: Final = FilterWords(
    {
        **dict.fromkeys(("metric", "metrics"), "metrics"),
        **dict.fromkeys(("param", "params", "parameter", "parameters"), "params"),
        **_OF_TAGS,
        **_OF_ATTRIBUTES,
    },
    {
        **{
            name: name
            for name in ("run_id", "run_name", "status", "artifact_uri", "user_id", "start_time", "end_time")
        },
        "Run name": "run_name",
        "created": "start_time",
    },
    ("start_time", "end_time"),
)
EXPERIMENTS: Final = FilterWords(
    {**_OF_TAGS, **_OF_ATTRIBUTES},
    {name: name for name in ("name", "experiment_id", "creation_time", "last_update_time")},
    ("creation_time", "last_update_time"),
)
MODELS: Final = FilterWords(
    {
        **dict.fromkeys(("param", "params", "parameter", "parameters"), "params"),
        **_OF_TAGS,
        **dict.fromkeys(("attribute", "attributes", "attr"), "info"),
    },
    {
        **{
            name: name
            for name in (
                *("name", "model_id", "model_type", "status", "source_run_id", "experiment_id"),
                *("creation_timestamp", "last_updated_timestamp"),
            )
        },
        "creation_time": "creation_timestamp",
    },
    ("creation_timestamp", "last_updated_timestamp"),
)
_NAME: Final = r"""(?:"[^"]*"|`[^`]*`|[\w./-]+)"""
_CONDITION: Final = re.compile(
    rf"""\s*(?:(?P<kind>[A-Za-z]+)\s*\.\s*)?(?P<name>{_NAME})\s*
    (?:(?P<null>IS\s+(?:NOT\s+)?NULL)
      |(?P<sign><=|>=|!=|<>|=|<|>|\bNOT\s+IN\b|\bIN\b|\bLIKE\b|\bILIKE\b)\s*
       (?P<value>'[^']*'|"[^"]*"|\([^)]*\)|[^\s]+))\s*""",
    re.VERBOSE | re.IGNORECASE,
)
_AND: Final = re.compile(r"\s*AND\b", re.IGNORECASE)
_ORDER: Final = re.compile(
    rf"\s*(?:(?P<kind>[A-Za-z]+)\s*\.\s*)?(?P<name>{_NAME})\s*(?P<way>ASC|DESC)?\s*", re.I
)


@dataclass(frozen=True, kw_only=True)
class FilterCondition:
    """One comparison of a filter. `kind`: metrics, params, tags or info."""

    kind: str
    name: str
    sign: str
    value: Any


def conditions_in(filter_text: str, words: FilterWords = RUNS) -> list[FilterCondition]:
    """The comparisons of a filter, joined by AND. Raises MlflowError for other texts."""
    conditions: list[FilterCondition] = []
    at = 0
    while filter_text[at:].strip():
        if conditions:
            joined = _AND.match(filter_text, at)
            if joined is None:
                raise MlflowError(f"Invalid filter: 'AND' was expected at {filter_text[at : at + 40]!r}.")
            at = joined.end()
        match = _CONDITION.match(filter_text, at)
        if match is None or len(conditions) >= MAX_CONDITIONS:
            raise MlflowError(f"Invalid filter at {filter_text[at : at + 40]!r}.")
        conditions.append(_condition(match, words))
        at = match.end()
    return conditions


def _condition(match: re.Match[str], words: FilterWords) -> FilterCondition:
    kind, name = _named(match["kind"], match["name"], words)
    if match["null"]:
        return FilterCondition(kind=kind, name=name, sign=" ".join(match["null"].upper().split()), value=None)
    sign, raw = " ".join(match["sign"].upper().split()), match["value"]
    value = _value(sign, raw, name, words.is_number(kind, name))
    return FilterCondition(kind=kind, name=name, sign=sign, value=value)


def _value(sign: str, raw: str, name: str, is_number: bool) -> Any:
    if sign.endswith("IN"):
        if not raw.startswith("("):
            raise MlflowError("Invalid filter: IN needs a list in parentheses.")
        parts = [_unquoted(part) for part in _parts(raw)]
        return [_as_number(part) for part in parts] if is_number else parts
    if is_number:
        if sign.endswith("LIKE"):
            raise MlflowError(f"Invalid filter: {name!r} is a number, and {sign} compares texts.")
        return _as_number(_unquoted(raw))
    if raw[0] not in "'\"":
        raise MlflowError(f"Invalid filter: the value of {name!r} must be in quotation marks.")
    return _unquoted(raw)


def orders_in(texts: Any, words: FilterWords = RUNS) -> list[tuple[str, str, bool]]:
    """Kind, name and whether it is descending of each key of `order_by`. Raises MlflowError."""
    if texts is None:
        return []
    if isinstance(texts, str):  # of a GET request
        texts = [texts]
    if not isinstance(texts, list) or len(texts) > MAX_CONDITIONS:
        raise MlflowError("'order_by' must be a short list of texts.")
    orders = []
    for order in texts:
        match = _ORDER.fullmatch(str(order)[:MAX_FILTER])
        if match is None:
            raise MlflowError(f"Invalid order_by clause {str(order)[:40]!r}.")
        orders.append((*_named(match["kind"], match["name"], words), (match["way"] or "").upper() == "DESC"))
    return orders


def _named(kind: str | None, name: str, words: FilterWords) -> tuple[str, str]:
    plain = _unquoted(name)
    if kind is None:
        kind = "attribute"
    if kind.lower() not in words.kinds:
        kinds = ", ".join(sorted({"attributes" if of == "info" else of for of in words.kinds.values()}))
        raise MlflowError(f"Invalid entity type {kind[:40]!r}: use one of {kinds}.")
    entity = words.kinds[kind.lower()]
    if entity == "info":
        if plain not in words.attributes:
            raise MlflowError(
                f"Invalid attribute {plain[:40]!r}: use one of {', '.join(sorted(words.attributes))}."
            )
        plain = words.attributes[plain]
    return entity, plain


def _unquoted(word: str) -> str:
    word = word.strip()
    return word[1:-1] if len(word) > 1 and word[0] in "'\"`" and word[-1] == word[0] else word


def _parts(listed: str) -> list[str]:
    return [part for part in listed.strip("()").split(",") if part.strip()]


def _as_number(value: Any) -> float:
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    try:
        return float(value)
    except (ValueError, TypeError):
        raise MlflowError(f"Invalid filter: {str(value)[:40]!r} is not a number.") from None
