"""The endpoint runs/search: MLflow's filter and order, over the newest runs of some experiments."""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest

from fp8scope_dashboard.api.auth import project_of
from fp8scope_dashboard.mlflow_tracking import experiments
from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import NOT_FINITE, Body, integer, text
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.runs import document

MAX_EXPERIMENTS: Final = 1_000
MAX_SEARCHED: Final = 5_000
MAX_FILTER: Final = 8_000
MAX_PAGE: Final = 1_000
MAX_CONDITIONS: Final = 50

_ATTRIBUTES: Final = {
    "run_id": "run_id",
    "run_name": "run_name",
    "Run name": "run_name",
    "status": "status",
    "artifact_uri": "artifact_uri",
    "user_id": "user_id",
    "start_time": "start_time",
    "created": "start_time",
    "end_time": "end_time",
}
_KINDS: Final = {
    **dict.fromkeys(("metric", "metrics"), "metrics"),
    **dict.fromkeys(("param", "params", "parameter", "parameters"), "params"),
    **dict.fromkeys(("tag", "tags"), "tags"),
    **dict.fromkeys(("attribute", "attributes", "attr", "run"), "info"),
}
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

    def holds(self, entries: dict[str, dict[str, Any]]) -> bool:
        """Return whether a run with these entries by kind meets it. What a run does not have meets none."""
        stored = entries[self.kind].get(self.name)
        if self.sign in ("IS NULL", "IS NOT NULL"):
            return (stored is None) == (self.sign == "IS NULL")
        if stored is None:
            return False
        is_number = self.kind == "metrics" or isinstance(stored, int)
        left = _as_number(stored) if is_number else str(stored)
        return _SIGNS[self.sign](left, self.value)


def search(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/search"""
    conditions = conditions_in(text(body, "filter", MAX_FILTER, default=""))
    limit = min(integer(body, "max_results", low=1, high=50_000, default=MAX_PAGE), MAX_PAGE)
    offset = integer(body, "page_token", low=0, default=0)
    documents = [document(run) for run in _runs(request, body)]
    matching = [run for run in documents if all(condition.holds(_entries(run)) for condition in conditions)]
    for kind, name, is_descending in reversed(orders_in(body.get("order_by"))):
        matching.sort(key=lambda run: _sort_key(_entries(run)[kind].get(name), is_descending))
    answer: dict[str, Any] = {"runs": matching[offset : offset + limit]}
    if len(matching) > offset + limit:
        answer["next_page_token"] = str(offset + limit)
    return answer


def _runs(request: HttpRequest, body: Body) -> list[MlflowRun]:
    ids = body.get("experiment_ids") or []
    if not isinstance(ids, list) or len(ids) > MAX_EXPERIMENTS:
        raise MlflowError(f"'experiment_ids' must be a list of at most {MAX_EXPERIMENTS} ids.")
    project = project_of(request)
    chosen = [experiments.experiment_of(project, str(name)).pk for name in ids]
    runs = MlflowRun.objects.filter(experiment__in=chosen, run__deleted_at=None)
    token = request.auth  # type: ignore[attr-defined]
    if not token.may("read"):
        runs = runs.filter(run__registered_with=token)
    view = text(body, "run_view_type", default="ACTIVE_ONLY")
    if view != "ALL":
        runs = runs.filter(run__archived_at__isnull=view != "DELETED_ONLY")
    newest = runs.select_related("experiment", "run").defer(
        "run__config", "run__environment", "run__summary", "run__error"
    )
    return list(newest.order_by("-start_time", "pk")[:MAX_SEARCHED])


def _entries(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    data = run["data"]
    return {
        "info": run["info"],
        **{
            kind: {entry["key"]: entry["value"] for entry in data[kind]}
            for kind in ("metrics", "params", "tags")
        },
    }


def conditions_in(filter_text: str) -> list[FilterCondition]:
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
        conditions.append(_condition(match))
        at = match.end()
    return conditions


def _condition(match: re.Match[str]) -> FilterCondition:
    kind, name = _named(match["kind"], match["name"])
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


def orders_in(texts: Any) -> list[tuple[str, str, bool]]:
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
        orders.append((*_named(match["kind"], match["name"]), (match["way"] or "").upper() == "DESC"))
    return orders


def _named(kind: str | None, name: str) -> tuple[str, str]:
    plain = _unquoted(name)
    if kind is None:
        kind = "attribute"
    if kind.lower() not in _KINDS:
        raise MlflowError(f"Invalid entity type {kind[:40]!r}: use metrics, params, tags or attributes.")
    entity = _KINDS[kind.lower()]
    if entity == "info":
        if plain not in _ATTRIBUTES:
            raise MlflowError(
                f"Invalid attribute {plain[:40]!r}: use one of {', '.join(sorted(_ATTRIBUTES))}."
            )
        plain = _ATTRIBUTES[plain]
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
