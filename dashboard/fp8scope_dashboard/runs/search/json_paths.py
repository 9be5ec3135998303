"""Conditions on entries of JSON columns, as jsonpath: values of another type do not match."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

from django.db.models import BooleanField, F, FloatField, Func, JSONField, Q
from django.db.models.expressions import RawSQL

from fp8scope_dashboard.runs.search.language import Operator
from fp8scope_dashboard.runs.search.values import ValueProblem, number_of

# A dotted name is an entry of nested objects, an entry whose name has dots, or both. With more parts, only
# the first two ways are tried.
MAX_PARTS: Final = 4
_INDEX = re.compile(r"(.+)\[(\d{1,6})\]")
# How scalars that are not finite are stored; see docs/wire.md.
NOT_FINITE: Final = {
    "nan": "NaN",
    "inf": "Infinity",
    "+inf": "Infinity",
    "infinity": "Infinity",
    "-inf": "-Infinity",
    "-infinity": "-Infinity",
}


class PathExists(Func):
    """A test that a jsonpath finds anything in a column; false if it does not apply."""

    function = "jsonb_path_exists"
    template = "coalesce(%(function)s(%(expressions)s, '{}'::jsonb, true), false)"

    def __init__(self, column: str, path: str) -> None:
        super().__init__(F(column), RawSQL("%s::jsonpath", [path]), output_field=BooleanField())


class PathValue(Func):
    """The first value that a jsonpath finds in a column, as JSON; NULL without one."""

    function = "jsonb_path_query_first"
    template = "%(function)s(%(expressions)s, '{}'::jsonb, true)"

    def __init__(self, column: str, path: str) -> None:
        super().__init__(F(column), RawSQL("%s::jsonpath", [path]), output_field=JSONField())


class AsFloat(Func):
    """A JSON number as a float."""

    template = "(%(expressions)s)::float8"

    def __init__(self, expression: Any) -> None:
        super().__init__(expression, output_field=FloatField())


def scalar_path(name: str) -> str:
    """The path of a scalar's last value; names of scalars have no parts."""
    return f"$.{json.dumps(name)}"


def entry_paths(name: str) -> list[str]:
    """The paths at which the entry `name` of a configuration may be, nested objects first."""
    parts = name.split(".")
    ways = list(_ways(parts)) if len(parts) <= MAX_PARTS else [parts, [name]]
    return ["$" + "".join(f".{_step(key)}" for key in way) for way in ways]


def _ways(parts: list[str]) -> Iterator[list[str]]:
    """Every way to join neighbouring parts."""
    if len(parts) == 1:
        yield parts
        return
    for way in _ways(parts[1:]):
        yield [parts[0], *way]
    for way in _ways(parts[1:]):
        yield [f"{parts[0]}.{way[0]}", *way[1:]]


def _step(key: str) -> str:
    match = _INDEX.fullmatch(key)
    return f"{json.dumps(match[1])}[{match[2]}]" if match else json.dumps(key)


def matches(column: str, paths: list[str], operator: Operator, value: str) -> Q:
    """The condition that an entry at one of the paths has this value, or a number compares with it.

    An asterisk alone matches any value.

    Raises:
        ValueProblem: the operator needs a number.
    """
    if operator == ":" and value == "*":
        wanted = paths
    else:
        test = _equals(value) if operator == ":" else _compares(operator, number_of(value))
        wanted = [f"{path} ? ({test})" for path in paths]
    condition = Q()
    for path in wanted:
        condition |= Q(PathExists(column, path))
    return condition


def scalar_matches(name: str, operator: Operator, value: str) -> Q:
    """The condition on the last value of a scalar. NaN compares with nothing; infinities compare.

    Raises:
        ValueProblem: the value is no number.
    """
    path = scalar_path(name)
    if operator == ":" and value == "*":
        return Q(PathExists("last_scalars", path))
    if operator == ":":
        special = NOT_FINITE.get(value.lower())
        test = f"@ == {json.dumps(special)}" if special else f"@ == {number_of(value)!r}"
    else:
        infinity = "Infinity" if operator in (">", ">=") else "-Infinity"
        test = f'@ {operator} {number_of(value)!r} || @ == "{infinity}"'
    return Q(PathExists("last_scalars", f"{path} ? ({test})"))


def finite_scalar(name: str) -> AsFloat:
    """The last value of a scalar as a float; NULL if it is not finite."""
    return AsFloat(PathValue("last_scalars", f'{scalar_path(name)} ? (@.type() == "number")'))


def _compares(operator: Operator, value: float) -> str:
    # Numbers are often written as texts, such as 1e-4 in YAML.
    return f"@.double() {operator} {value!r}"


def _equals(value: str) -> str:
    tests = [_is_like(value)]
    try:
        number = number_of(value)
    except ValueProblem:
        number = math.nan
    if math.isfinite(number):
        tests.append(f"@.double() == {number!r}")
    if value.lower() in ("true", "false", "null"):
        tests.append(f"@ == {value.lower()}")
    return " || ".join(tests)


def _is_like(value: str) -> str:
    """The test of a text in any spelling; an asterisk stands for any characters."""
    pattern = ".*".join(re.escape(part) for part in value.split("*"))
    return f'@ like_regex {json.dumps(f"^{pattern}$")} flag "is"'
