"""Search a project's runs: `precision:fp8 recipe:delayed state:failed text`.

A query is words and `field:value` terms, separated by spaces; quotes keep spaces together, as in
`tag:"two words"`. Terms of one field are alternatives, but every tag and every word must match. To add a
field, add a function of its value to FIELDS.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Q, QuerySet

from fp8scope_dashboard.runs.models import Run, RunState

MAX_LENGTH = 300
MAX_TERMS = 20

_TERM = re.compile(r'(?:(?P<field>[a-z][a-z0-9_.]*):)?(?:"(?P<quoted>[^"]*)"?|(?P<plain>\S+))', re.IGNORECASE)
_RECIPE_KEY = re.compile(r"recipe\.([a-z0-9_]{1,32})")


@dataclass(frozen=True)
class Query:
    """A parsed query: terms by field, words, and what could not be understood."""

    terms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    text: str = ""
    problems: tuple[str, ...] = ()


def parse(text: str) -> Query:
    """Parse a query; never fails. Unknown fields become problems and are left out."""
    text = text.replace("\0", "").strip()[:MAX_LENGTH]
    terms: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    problems: list[str] = []
    for count, match in enumerate(_TERM.finditer(text)):
        if count == MAX_TERMS:
            problems.append(f"Only the first {MAX_TERMS} terms count.")
            break
        name = (match["field"] or "").lower()
        value = match["plain"] if match["quoted"] is None else match["quoted"]
        if not name:
            words.append(value)
        elif name in FIELDS or _RECIPE_KEY.fullmatch(name):
            terms[name] = (*terms.get(name, ()), value)
        else:
            problems.append(f"There is no field “{name}”. Fields: {', '.join(FIELDS)}, recipe.NAME.")
    return Query(terms, tuple(words), text, tuple(problems))


def search(runs: QuerySet[Run], query: Query) -> QuerySet[Run]:
    """The runs that match a query."""
    for name, values in query.terms.items():
        if name == "tag":
            runs = runs.filter(tags__contains=list(values))
        else:
            runs = runs.filter(reduce(or_, (_condition(name, value) for value in values)))
    if query.words:
        each = [_has_word(word) for word in query.words]
        # A tag may have spaces: the query as a whole is one, too.
        whole = Q(tags__contains=[query.text[:64]]) if not query.terms else Q(pk__in=())
        runs = runs.filter(reduce(lambda a, b: a & b, each) | whole)
    return runs


def _condition(name: str, value: str) -> Q:
    if key := _RECIPE_KEY.fullmatch(name):
        return _recipe_entry(key[1], value)
    return FIELDS[name](value)


def _has_word(word: str) -> Q:
    return Q(name__icontains=word) | Q(group__icontains=word) | Q(tags__contains=[word[:64]])


def _recipe(value: str) -> Q:
    """A recipe by the beginning of its name: `delayed` is DelayedScaling."""
    return Q(recipe_name__istartswith=value)


def _recipe_entry(key: str, value: str) -> Q:
    """A value of the recipe, or of that of shadow mode; texts in any of the usual spellings."""
    values: list[Any] = [value, value.upper(), value.lower()]
    with suppress(ValueError):
        number = json.loads(value)
        if isinstance(number, int) or (isinstance(number, float) and math.isfinite(number)):
            values.append(number)
    return reduce(
        or_,
        (Q(recipe__contains={key: each}) | Q(recipe__contains={"shadow": {key: each}}) for each in values),
    )


def _seed(value: str) -> Q:
    is_seed = re.fullmatch(r"-?[0-9]{1,18}", value)
    return Q(seed=int(value)) if is_seed else Q(pk__in=())


FIELDS: Mapping[str, Callable[[str], Q]] = {
    "precision": lambda value: Q(precision=value.lower()[:32]),
    "recipe": _recipe,
    "margin": lambda value: _recipe_entry("margin", value),
    "format": lambda value: _recipe_entry("fp8_format", value),
    "state": lambda value: Q(state=value.lower()) if value.lower() in RunState.values else Q(pk__in=()),
    "group": lambda value: Q(group=value[:128]),
    "baseline": lambda value: Q(baseline=value[:128]),
    "parent": lambda value: Q(parent=value[:128]),
    "seed": _seed,
    "tag": lambda value: Q(tags__contains=[value[:64]]),
}
