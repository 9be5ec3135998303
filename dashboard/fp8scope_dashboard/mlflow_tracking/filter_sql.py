"""Filters, orders and pages as SQL, so that the database reads what it answers and no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from django.db import transaction
from django.db.models import BooleanField, F, FloatField, Func, Model, Q, QuerySet, TextField, Value
from django.db.models.expressions import Combinable, OrderBy
from django.db.models.functions import Cast, Collate, NullIf
from django.db.models.lookups import (
    Exact,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

from fp8scope_dashboard.mlflow_tracking.fields import Body, integer, text
from fp8scope_dashboard.mlflow_tracking.filters import (
    MAX_FILTER,
    FilterCondition,
    FilterWords,
    conditions_in,
    orders_in,
)

MAX_RESULTS: Final = 50_000
MAX_PAGE_TEXT: Final = 16_000_000
ROWS_AT_ONCE: Final = 100
_JSON_COLUMNS: Final = ("params", "tags", "metrics", "datasets", "model_inputs", "model_outputs")
_COMPARISONS: Final = {
    "=": Exact,
    "<": LessThan,
    "<=": LessThanOrEqual,
    ">": GreaterThan,
    ">=": GreaterThanOrEqual,
    "IN": In,
}
_NEGATED: Final = {"!=": "=", "<>": "=", "NOT IN": "IN"}
Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True)
class FilteredTable:
    """The words of a table's filters, and the expression of each attribute."""

    words: FilterWords
    attributes: Mapping[str, Combinable]

    def expression(self, kind: str, name: str) -> Any:
        """The SQL of an attribute, a tag, a parameter or the latest value of a metric; NULL without one."""
        if kind == "info":
            return self.attributes[name]
        if kind == "metrics":
            return Cast(entry("metrics", name, "0"), FloatField())
        return entry(kind, name)


@dataclass(frozen=True)
class FoundPage(Generic[Row]):
    """A page of rows, and `next_page_token` if there are more."""

    rows: list[Row]
    next_token: dict[str, str]


def entry(column: str, *path: str) -> Func:
    """The text of an entry of a JSON column, whatever its name; NULL if there is none."""
    # The lookups of Django take a name such as "3" for a position in a list.
    names = [Value(name, output_field=TextField()) for name in path]
    return Func(F(column), *names, function="jsonb_extract_path_text", output_field=TextField())


def milliseconds(column: str) -> Func:
    """A time in whole milliseconds since 1970."""
    return Func(
        F(column), template="floor(extract(epoch FROM %(expressions)s) * 1000)", output_field=FloatField()
    )


def page_of(rows: QuerySet[Row], body: Body, table: FilteredTable, most: int) -> FoundPage[Row]:
    """The page of `rows` that a request asks for by filter, order_by, max_results and page_token.

    Args:
        rows: in the order that decides where the request names none.
        most: the most rows of a page. It also ends when its texts have more than MAX_PAGE_TEXT characters.

    Raises:
        MlflowError: one of them is not valid.
    """
    for condition in conditions_in(text(body, "filter", MAX_FILTER, default=""), table.words):
        rows = rows.filter(_matches(condition, table))
    orders = [
        key
        for kind, name, is_descending in orders_in(body.get("order_by"), table.words)
        for key in _keys(table, kind, name, is_descending)
    ]
    limit = min(integer(body, "max_results", low=1, high=MAX_RESULTS, default=most), most)
    offset = integer(body, "page_token", low=0, default=0)
    asked = rows.order_by(*orders, *rows.query.order_by)[offset : offset + limit + 1]
    page, has_more = _first_rows(asked, limit)
    return FoundPage(page, {"next_page_token": str(offset + len(page))} if has_more else {})


def _first_rows(asked: QuerySet[Row], limit: int) -> tuple[list[Row], bool]:
    """At most `limit` rows, fewer if their texts are large; and whether there are more."""
    page: list[Row] = []
    size = 0
    # Large pages are read in parts, which a pooler answers from one connection only within a transaction.
    with transaction.atomic(using=asked.db, savepoint=False):
        for row in asked.iterator(chunk_size=ROWS_AT_ONCE) if limit > ROWS_AT_ONCE else asked:
            if len(page) == limit or size > MAX_PAGE_TEXT:
                return page, True
            page.append(row)
            size += sum(len(str(getattr(row, column, ""))) for column in _JSON_COLUMNS)
    return page, False


def _matches(condition: FilterCondition, table: FilteredTable) -> Q:
    """The condition as SQL. What is NULL meets none but IS NULL."""
    left = table.expression(condition.kind, condition.name)
    if condition.sign.endswith("NULL"):
        return Q(IsNull(left, condition.sign == "IS NULL"))
    if condition.sign.endswith("LIKE"):
        # A backslash is a character like others in MLflow's patterns.
        pattern = Value(condition.value.replace("\\", "\\\\"), output_field=TextField())
        return Q(
            Func(
                left,
                pattern,
                template="%(expressions)s",
                arg_joiner=f" {condition.sign} ",
                output_field=BooleanField(),
            )
        )
    if not table.words.is_number(condition.kind, condition.name):
        left = Collate(Cast(left, TextField()), "C")
    elif condition.sign not in _NEGATED:
        left = _finite(left)
    if condition.sign in _NEGATED:
        return ~Q(_COMPARISONS[_NEGATED[condition.sign]](left, condition.value))
    return Q(_COMPARISONS[condition.sign](left, condition.value))


def _keys(table: FilteredTable, kind: str, name: str, is_descending: bool) -> list[OrderBy]:
    """The keys to sort by: values, then NaN, then what has none, in both directions."""
    value = table.expression(kind, name)
    if not table.words.is_number(kind, name):
        return [OrderBy(Collate(Cast(value, TextField()), "C"), descending=is_descending, nulls_last=True)]
    return [
        OrderBy(_finite(value), descending=is_descending, nulls_last=True),
        OrderBy(IsNull(value, True)),
    ]


def _finite(number: Any) -> Any:
    """The number, or NULL for NaN, which is larger than all others in PostgreSQL."""
    return NullIf(Cast(number, FloatField()), Value(math.nan, output_field=FloatField()))
