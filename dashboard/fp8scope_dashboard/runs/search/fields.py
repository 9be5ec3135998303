"""The fields of a search: what each means, and its condition on runs.

To add a field, add a `SearchField` to `_BUILT_IN`. Besides them, every logged scalar and every entry of the
configuration, recipe, summary and environment is a field.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Final
from uuid import UUID

from django.db.models import Count, DurationField, ExpressionWrapper, F, Q
from django.db.models.functions import Coalesce
from django.db.models.lookups import GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.runs.search.json_paths import (
    PathExists,
    entry_paths,
    matches,
    scalar_matches,
)
from fp8scope_dashboard.runs.search.language import Operator, Query, SearchTerm, parse
from fp8scope_dashboard.runs.search.values import (
    ValueProblem,
    duration_of,
    moment_of,
    number_of,
    whole_number_of,
)
from fp8scope_dashboard.runs.search.vocabulary import Vocabulary

VERDICTS: Final = ("equivalent", "better", "worse", "cannot_tell", "pending", "incomplete", "none")
SEVERITIES: Final = ("critical", "warning")
# The states that words of people mean; other programs have several of them.
STATE_WORDS: Final[Mapping[str, tuple[RunState, ...]]] = {
    **{state.value: (state,) for state in RunState},
    "active": (RunState.RUNNING,),
    "completed": (RunState.FINISHED,),
    "done": (RunState.FINISHED,),
    "crashed": (RunState.FAILED, RunState.SILENT),
    "killed": (RunState.FAILED, RunState.SILENT),
}
_LOOKUPS: Final = {":": "exact", "<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
_COMPARED: Final = {
    "<": LessThan,
    "<=": LessThanOrEqual,
    ">": GreaterThan,
    ">=": GreaterThanOrEqual,
}
_MIRRORED: Final[Mapping[Operator, Operator]] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", ":": ":"}


@dataclass(frozen=True, kw_only=True)
class SearchField:
    """A field that searches may name.

    Attributes:
        help: for suggestions.
        condition: of an operator and a value. Raises ValueProblem with what to write instead.
        compares: whether the field has an order, so that < and > apply.
        values: all values, if they are few.
        every: whether all terms of the field must match; otherwise they are alternatives.
        example: a term for messages.
    """

    name: str
    help: str
    condition: Callable[[Operator, str], Q]
    example: str
    compares: bool = False
    values: tuple[str, ...] = ()
    every: bool = False


def _text(column: str, length: int) -> Callable[[Operator, str], Q]:
    """A text in its exact spelling; an asterisk stands for any characters."""

    def condition(_: Operator, value: str) -> Q:
        if value == "*":
            return ~Q(**{column: ""})
        if "*" in value:
            pattern = ".*".join(re.escape(part) for part in value.split("*"))
            return Q(**{f"{column}__iregex": f"^{pattern}$"})
        return Q(**{column: value[:length]})

    return condition


def _whole_number(column: str) -> Callable[[Operator, str], Q]:
    def condition(operator: Operator, value: str) -> Q:
        # Without isnull the negation of a comparison would leave out runs without a value.
        return Q(**{f"{column}__{_LOOKUPS[operator]}": whole_number_of(value), f"{column}__isnull": False})

    return condition


def _moment(column: str) -> Callable[[Operator, str], Q]:
    def condition(operator: Operator, value: str) -> Q:
        first, last = moment_of(value)
        if operator == ":":
            return Q(**{f"{column}__range": (first, last), f"{column}__isnull": False})
        bound = last if operator in (">", "<=") else first
        return Q(**{f"{column}__{_LOOKUPS[operator]}": bound, f"{column}__isnull": False})

    return condition


def duration_expression() -> ExpressionWrapper[Any]:
    """Return how long a run took, or has been heard from."""
    end = Coalesce("finished_at", "heartbeat_at")
    return ExpressionWrapper(end - F("created_at"), output_field=DurationField())


def _duration(operator: Operator, value: str) -> Q:
    if operator == ":":
        raise ValueProblem("a comparison, such as duration>2h")
    return Q(_COMPARED[operator](duration_expression(), duration_of(value)))


def _age(operator: Operator, value: str) -> Q:
    if operator == ":":
        raise ValueProblem("a comparison, such as age<7d")
    return Q(**{f"created_at__{_LOOKUPS[_MIRRORED[operator]]}": timezone.now() - duration_of(value)})


def in_state(word: str) -> Q | None:
    """The condition on the state that a word means; None if it means none."""
    states = STATE_WORDS.get(word.lower())
    return None if states is None else Q(state__in=states)


def _state(_: Operator, value: str) -> Q:
    condition = in_state(value)
    if condition is None:
        raise ValueProblem(f"one of {', '.join(RunState.values)}")
    return condition


def _verdict(_: Operator, value: str) -> Q:
    if value.lower() not in VERDICTS:
        raise ValueProblem(f"one of {', '.join(VERDICTS)}")
    return Q(comparison__isnull=True) if value.lower() == "none" else Q(comparison__verdict=value.lower())


def _delta(operator: Operator, value: str) -> Q:
    if operator == ":":
        raise ValueProblem("a comparison, such as delta>0.25%")
    # Compared with nulls, jsonpath finds nothing.
    return Q(PathExists("comparison__result", f"$.delta ? (@ {operator} {number_of(value)!r})"))


def _alerts(operator: Operator, value: str) -> Q:
    """Open alerts: whether there are any, of which severity, or how many."""
    runs = Run.objects.filter(alerts__state="open")
    kind = value.lower()
    if operator == ":" and kind in SEVERITIES:
        return Q(pk__in=runs.filter(alerts__severity=kind).order_by().values("pk"))
    if operator == ":" and kind in ("yes", "no"):
        some = Q(pk__in=runs.order_by().values("pk"))
        return some if kind == "yes" else ~some
    count = whole_number_of(value)
    counted = runs.order_by().values("pk").annotate(open=Count("alerts"))
    if operator in ("<", "<="):
        return ~_alerts(">=" if operator == "<" else ">", value)
    if count <= 0 and operator != ">":
        # Runs without alerts are not counted.
        return _alerts(":", "no") if operator == ":" else Q()
    return Q(pk__in=counted.filter(**{f"open__{_LOOKUPS[operator]}": count}).values("pk"))


def _recipe(_: Operator, value: str) -> Q:
    """A recipe by the beginning of its name: `delayed` is DelayedScaling."""
    return Q(recipe_name__istartswith=value[:64]) if value else Q(recipe_name="")


def _recipe_entry(key: str, operator: Operator, value: str) -> Q:
    """An entry of the recipe, or of that of shadow mode."""
    paths = entry_paths(key)
    shadow = [path.replace("$", "$.shadow", 1) for path in paths]
    return matches("recipe", [*paths, *shadow], operator, value)


def _archived(_: Operator, value: str) -> Q:
    conditions = {"yes": Q(archived_at__isnull=False), "no": Q(archived_at=None), "all": Q()}
    if value.lower() not in conditions:
        raise ValueProblem("one of yes, no, all")
    return conditions[value.lower()]


def _id(_: Operator, value: str) -> Q:
    if not re.fullmatch(r"[0-9a-fA-F-]{1,36}", value):
        raise ValueProblem("the beginning of a run's id, such as id:1f3a")
    with suppress(ValueError):
        return Q(pk=UUID(value))
    return Q(id__startswith=value.lower())


def _tag(_: Operator, value: str) -> Q:
    return Q(tags__contains=[value[:64]])


_BUILT_IN: Final = (
    SearchField(
        name="precision",
        help="bf16, fp8, ...",
        condition=lambda _, value: Q(precision=value.lower()[:32]),
        example="precision:fp8",
    ),
    SearchField(
        name="recipe", help="beginning of the recipe’s name", condition=_recipe, example="recipe:delayed"
    ),
    SearchField(
        name="margin",
        help="margin of the recipe",
        condition=lambda operator, value: _recipe_entry("margin", operator, value),
        example="margin:2",
        compares=True,
    ),
    SearchField(
        name="format",
        help="FP8 format of the recipe",
        condition=lambda operator, value: _recipe_entry("fp8_format", operator, value),
        example="format:hybrid",
    ),
    SearchField(
        name="state",
        help="running, finished, failed or silent",
        condition=_state,
        example="state:failed",
        values=tuple(RunState.values),
    ),
    SearchField(
        name="verdict",
        help="verdict of FP8 against BF16",
        condition=_verdict,
        example="verdict:worse",
        values=VERDICTS,
    ),
    SearchField(
        name="delta",
        help="difference of the loss to BF16",
        condition=_delta,
        example="delta>0.25%",
        compares=True,
    ),
    SearchField(
        name="alerts",
        help="open alerts: yes, no, critical, warning or a number",
        condition=_alerts,
        example="alerts:yes",
        compares=True,
        values=("yes", "no", *SEVERITIES),
    ),
    SearchField(
        name="tag", help="a tag; several must all match", condition=_tag, example="tag:prod", every=True
    ),
    SearchField(
        name="name",
        help="part of the name",
        condition=lambda _, value: Q(name__icontains=value),
        example="name:gpt",
    ),
    SearchField(name="group", help="seed group", condition=_text("group", 128), example="group:bf16"),
    SearchField(
        name="baseline",
        help="what the run is compared with",
        condition=_text("baseline", 128),
        example="baseline:bf16",
    ),
    SearchField(
        name="owner",
        help="user name of the person whose token registered the run",
        condition=lambda _, value: Q(owner__username=value[:150]),
        example="owner:ada",
    ),
    SearchField(name="parent", help="id of the parent", condition=_text("parent", 128), example="parent:ID"),
    SearchField(name="seed", help="seed", condition=_whole_number("seed"), example="seed:3", compares=True),
    SearchField(
        name="step", help="last step", condition=_whole_number("last_step"), example="step>10k", compares=True
    ),
    SearchField(
        name="planned",
        help="planned number of steps",
        condition=_whole_number("total_steps"),
        example="planned>=10k",
        compares=True,
    ),
    SearchField(
        name="points",
        help="points stored",
        condition=_whole_number("points_stored"),
        example="points>1M",
        compares=True,
    ),
    SearchField(
        name="loss",
        help="last loss",
        condition=lambda operator, value: scalar_matches("loss", operator, value),
        example="loss<2.5",
        compares=True,
    ),
    SearchField(
        name="duration",
        help="time from start to end",
        condition=_duration,
        example="duration>2h",
        compares=True,
    ),
    SearchField(name="age", help="time since the start", condition=_age, example="age<7d", compares=True),
    SearchField(
        name="created",
        help="start, in UTC",
        condition=_moment("created_at"),
        example="created>2026-10-01",
        compares=True,
    ),
    SearchField(
        name="ended",
        help="end, in UTC",
        condition=_moment("finished_at"),
        example="ended<2026-10-01",
        compares=True,
    ),
    SearchField(
        name="archived",
        help="yes, or all with the others",
        condition=_archived,
        example="archived:yes",
        values=("yes", "no", "all"),
    ),
    SearchField(name="id", help="beginning of the id", condition=_id, example="id:1f3a"),
)
FIELDS: Final[Mapping[str, SearchField]] = {field.name: field for field in _BUILT_IN}

# Prefixes of fields that are entries of a JSON column.
PREFIXES: Final[Mapping[str, str]] = {
    "config": "entry of the configuration",
    "scalar": "last value of a logged scalar",
    "recipe": "entry of the recipe",
    "summary": "entry of the summary",
    "environment": "entry of the environment",
}


_WITHOUT_VALUE: Final = re.compile(r"-?([A-Za-z_][\w./\[\]-]*?)(?:[:=<>]|!=|<=|>=|==)")
# Words of the pages for fields of another name.
OTHER_NAMES: Final[Mapping[str, str]] = {
    "started": "created",
    "steps": "step",
    "tags": "tag",
    "alert": "alerts",
}


def field_named(name: str) -> SearchField | None:
    """The field with a canonical name: a built-in one, or one with a prefix; None if there is none."""
    if name in FIELDS:
        return FIELDS[name]
    prefix, _, rest = name.partition(".")
    if prefix not in PREFIXES or not rest:
        return None

    def condition(operator: Operator, value: str) -> Q:
        if prefix == "scalar":
            return scalar_matches(rest, operator, value)
        if prefix == "recipe":
            return _recipe_entry(rest, operator, value)
        return matches(prefix, entry_paths(rest), operator, value)

    return SearchField(
        name=name, help=PREFIXES[prefix], condition=condition, example=f"{name}:1", compares=True
    )


def read(text: str, vocabulary: Vocabulary | None = None) -> Query:
    """Parse a search and check its terms; see `language.parse` and `check`."""
    names = vocabulary or Vocabulary()
    return parse(text, lambda term: check(term, names))


def check(term: SearchTerm, vocabulary: Vocabulary) -> SearchTerm | str:
    """The term under the canonical name of its field, or the sentence that says what is wrong with it."""
    if not term.field:
        if term.operator != ":":
            return f"Write a field before “{term.text}”, as in loss<2.5."
        return _unfinished(term, vocabulary) or term
    name = _canonical(term.field, vocabulary)
    if isinstance(name, list):
        return _unknown(term.field, name, vocabulary)
    field = field_named(name)
    assert field is not None, name
    if term.operator != ":" and not field.compares:
        return f"“{term.text}”: {field.name} has no order. Write {field.example}."
    try:
        field.condition(term.operator, term.value)
    except ValueProblem as problem:
        return f"“{term.text}”: after {term.field}{term.operator} write {problem}."
    return replace(term, field=name)


def _unfinished(term: SearchTerm, vocabulary: Vocabulary) -> str:
    """Return what is wrong with `loss<` and `tag:`; empty for words. A colon may also end a word."""
    match = _WITHOUT_VALUE.fullmatch(term.text)
    name = _canonical(match[1], vocabulary) if match else []
    field = field_named(name) if isinstance(name, str) else None
    return "" if field is None else f"“{term.text}” has no value. Write it there, as in {field.example}."


def _canonical(name: str, vocabulary: Vocabulary) -> str | list[str]:
    """The canonical name of a field; a list of what may be meant if it is unknown or ambiguous."""
    lower = name.lower()
    if lower in FIELDS:
        return lower
    own_name = name in vocabulary.scalars or bool(vocabulary.config_named(name))
    if lower in OTHER_NAMES and not own_name:
        return OTHER_NAMES[lower]
    prefix, dot, rest = name.partition(".")
    if prefix.lower() in PREFIXES and rest:
        return f"{prefix.lower()}{dot}{rest}"
    if name in vocabulary.scalars:
        return f"scalar.{name}"
    keys = vocabulary.config_named(name)
    return f"config.{keys[0]}" if len(keys) == 1 else [f"config.{key}" for key in keys]


def _unknown(name: str, meant: list[str], vocabulary: Vocabulary) -> str:
    if meant:
        return f"“{name}” may be {' or '.join(meant[:4])}: write one of them."
    names = [*FIELDS, *vocabulary.scalars, *vocabulary.config]
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"Did you mean {' or '.join(close)}? " if close else f"Fields: {', '.join(FIELDS)}. "
    return (
        f"There is no field “{name}”. {hint}"
        f"For a configuration key write config.{name}, for a logged scalar scalar.{name}."
    )


def condition_of(term: SearchTerm) -> Q:
    """The condition of a checked term, without its negation."""
    field = field_named(term.field)
    assert field is not None, term.field
    return field.condition(term.operator, term.value)


def is_alternative(term: SearchTerm) -> bool:
    """Return whether further terms of the same field are alternatives to this one."""
    field = field_named(term.field)
    return field is not None and not field.every and term.operator == ":" and not term.negated


def any_of(conditions: list[Q]) -> Q:
    """The condition that at least one of these holds."""
    return reduce(or_, conditions)


def text_of(value: Any) -> str:
    """A JSON value as a search writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
