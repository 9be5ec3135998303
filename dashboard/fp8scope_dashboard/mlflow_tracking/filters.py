"""MLflow's filters and orders, for runs and for experiments."""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import NOT_FINITE, Body, integer, text

MAX_FILTER: Final = 8_000
MAX_CONDITIONS: Final = 50
MAX_RESULTS: Final = 50_000

Entries = Mapping[str, Mapping[str, Any]]
"""The values of a run or an experiment, by kind and name."""


@dataclass(frozen=True)
class FilterWords:
    """The words of filters: kinds by name, and attributes by name."""

    kinds: Mapping[str, str]
    attributes: Mapping[str, str]


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
)
EXPERIMENTS: Final = FilterWords(
    {**_OF_TAGS, **_OF_ATTRIBUTES},
    {name: name for name in ("name", "experiment_id", "creation_time", "last_update_time")},
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
_SIGNS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "LIKE": lambda left, right: fnmatch.fnmatchcase(left, _pattern(right)),
    "ILIKE": lambda left, right: fnmatch.fnmatchcase(left.lower(), _pattern(right.lower())),
    "IN": lambda left, right: left in right,
    "NOT IN": lambda left, right: left not in right,
}


@dataclass(frozen=True, kw_only=True)
class FilterCondition:
    """One comparison of a filter. `kind`: metrics, params, tags or info."""

    kind: str
    name: str
    sign: str
    value: Any

    def holds(self, entries: Entries) -> bool:
        """Return whether something with these entries meets it. What it does not have meets none."""
        stored = entries[self.kind].get(self.name)
        if self.sign in ("IS NULL", "IS NOT NULL"):
            return (stored is None) == (self.sign == "IS NULL")
        if stored is None:
            return False
        is_number = self.kind == "metrics" or isinstance(stored, int)
        left = _as_number(stored) if is_number else str(stored)
        return _SIGNS[self.sign](left, self.value)


@dataclass(frozen=True)
class FoundPage:
    """A page of results, and `next_page_token` if there is more."""

    documents: list[dict[str, Any]]
    next_token: dict[str, str]


def page_of(
    documents: Iterable[dict[str, Any]],
    body: Body,
    words: FilterWords,
    entries_of: Callable[[dict[str, Any]], Entries],
    most: int,
) -> FoundPage:
    """The page of `documents` that a request asks for by filter, order_by, max_results and page_token.

    Raises MlflowError if one of them is not valid.
    """
    conditions = conditions_in(text(body, "filter", MAX_FILTER, default=""), words)
    orders = orders_in(body.get("order_by"), words)
    limit = min(integer(body, "max_results", low=1, high=MAX_RESULTS, default=most), most)
    offset = integer(body, "page_token", low=0, default=0)
    described = ((document, entries_of(document)) for document in documents)
    matching = [
        (document, entries)
        for document, entries in described
        if all(condition.holds(entries) for condition in conditions)
    ]
    for kind, name, is_descending in reversed(orders):
        matching.sort(key=lambda pair: _sort_key(pair[1][kind].get(name), is_descending))
    token = {"next_page_token": str(offset + limit)} if len(matching) > offset + limit else {}
    return FoundPage([document for document, _ in matching[offset : offset + limit]], token)


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
    if sign.endswith("IN"):
        if not raw.startswith("("):
            raise MlflowError("Invalid filter: IN needs a list in parentheses.")
        return FilterCondition(
            kind=kind, name=name, sign=sign, value=[_unquoted(part) for part in _parts(raw)]
        )
    if kind == "metrics" or (kind == "info" and name.endswith("_time")):
        return FilterCondition(kind=kind, name=name, sign=sign, value=_as_number(_unquoted(raw)))
    if raw[0] not in "'\"":
        raise MlflowError(f"Invalid filter: the value of {name!r} must be in quotation marks.")
    return FilterCondition(kind=kind, name=name, sign=sign, value=_unquoted(raw))


def orders_in(texts: Any, words: FilterWords = RUNS) -> list[tuple[str, str, bool]]:
    """Kind, name and whether it is descending of each key of `order_by`. Raises MlflowError."""
    if texts is None:
        return []
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


def _pattern(like: str) -> str:
    """A pattern of SQL as one of a shell."""
    escaped = "".join(f"[{character}]" if character in "*?[" else character for character in like)
    return escaped.replace("%", "*").replace("_", "?")


def _as_number(value: Any) -> float:
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    try:
        return float(value)
    except (ValueError, TypeError):
        raise MlflowError(f"Invalid filter: {str(value)[:40]!r} is not a number.") from None


def _sort_key(value: Any, is_descending: bool) -> tuple[int, Any]:
    """Runs without a value come last, NaN before them."""
    if value is None:
        return 2, 0
    if isinstance(value, str) and value not in NOT_FINITE:
        return 0, _Reversed(value) if is_descending else value
    number = _as_number(value)
    if math.isnan(number):
        return 1, 0
    return 0, -number if is_descending else number


class _Reversed:
    """A text in descending order."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __lt__(self, other: _Reversed) -> bool:
        return other._value < self._value
