"""Suggestions for the last term of a search that is being typed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.runs.models import RunState
from fp8scope_dashboard.runs.search import FIELDS, Vocabulary
from fp8scope_dashboard.runs.search.language import quoted
from fp8scope_dashboard.runs.search.vocabulary import common_tags, common_values

MOST: Final = 12
_LAST = re.compile(r'(?:^|\s)(-?)((?:[^\s":<>=]+)?)(?:(:)("?)([^"]*))?$')
_VALUE_COLUMNS: Final = {
    "precision": "precision",
    "recipe": "recipe_name",
    "group": "group",
    "baseline": "baseline",
}

Suggestion = dict[str, str]


def suggestions(
    project: Project, text: str, vocabulary: Vocabulary, *, names_only: bool = False
) -> list[Suggestion]:
    """Completions of the last term of `text`: the whole text with it (`text`), and what to show for it.

    With `names_only`, `text` is the key of a column that is being typed: scalar.NAME or config.NAME.
    """
    if names_only:
        keys = (f"{kind}.{name}" for kind, name in _names(vocabulary))
        return [_entry(key, key, "") for key in keys if text.lower() in key.lower()][:MOST]
    match = _LAST.search(text)
    if match is None:
        return []
    minus, name, colon, value = match[1], match[2], match[3], match[5] or ""
    head = text[: match.start(1)]
    if colon:
        matching = [
            candidate for candidate in _values(project, name.lower()) if value.lower() in candidate.lower()
        ]
        terms = [
            (f"{minus}{name}:{quoted(candidate)}", _note(name, candidate)) for candidate in matching[:MOST]
        ]
        # A completed term needs no suggestion.
        return [_entry(f"{head}{term} ", term, note) for term, note in terms if not text.endswith(term)]
    # Suggest only once something was typed, so that the list does not cover the page.
    return _fields(head, minus, name, vocabulary) if name else []


def metric_suggestions(text: str, vocabulary: Vocabulary) -> list[Suggestion]:
    """The names of logged scalars that contain a text."""
    names = [name for name in vocabulary.scalars if text.lower() in name.lower()]
    return [_entry(name, name, "") for name in names[:MOST]]


def _fields(head: str, minus: str, name: str, vocabulary: Vocabulary) -> list[Suggestion]:
    """The fields whose names begin with the typed one, then those that contain it."""
    fields = [
        (field.name, field.help, "" if field.compares and not field.values else ":")
        for field in FIELDS.values()
    ]
    fields += [(f"{kind}.{candidate}", _KIND_HELP[kind], "") for kind, candidate in _names(vocabulary)]
    prefix = name.lower()
    near = [other for other in fields if other[0].lower().startswith(prefix)]
    near += [other for other in fields if other not in near and prefix in other[0].lower()]
    terms = [(f"{minus}{candidate}{end}", note) for candidate, note, end in near]
    states = [state for state in RunState.values if state.startswith(prefix)]
    terms += [(f"{minus}state:{state}", "runs in this state") for state in states]
    return [_entry(f"{head}{term}", term, note) for term, note in terms[:MOST]]


_KIND_HELP: Final = {"scalar": "last value of a logged scalar", "config": "entry of the configuration"}


def _names(vocabulary: Vocabulary) -> Iterable[tuple[str, str]]:
    yield from (("scalar", name) for name in vocabulary.scalars)
    yield from (("config", name) for name in vocabulary.config)


def _values(project: Project, field: str) -> list[str]:
    """The values of a field that can be listed."""
    if field in FIELDS and FIELDS[field].values:
        return list(FIELDS[field].values)
    if field == "tag":
        return common_tags(project)
    return common_values(project, _VALUE_COLUMNS[field]) if field in _VALUE_COLUMNS else []


def _note(field: str, value: str) -> str:
    return precision_label(value) if field == "precision" and precision_label(value) != value else ""


def _entry(text: str, label: str, note: str) -> Suggestion:
    return {"text": text, "label": label, "note": note}
