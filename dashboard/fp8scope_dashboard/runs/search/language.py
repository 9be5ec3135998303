"""The grammar of a search: words and terms of a field, an operator and a value. Pure functions.

    precision:fp8 loss<2.5 -tag:x "two words" config.model.depth:12

A minus negates a term. Quotes keep spaces together; a backslash before a quote makes it part of the
value. What a field means is in `fields`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

MAX_LENGTH: Final = 500
MAX_TERMS: Final = 30

Operator = Literal[":", "<", "<=", ">", ">="]

# Spaces may surround comparisons, as in `loss < 2.5`, but not a colon, which also ends a word of a sentence.
_TERM = re.compile(
    r"""
    (?P<minus>-)?
    (?:
        (?P<field>[A-Za-z_][\w./\[\]-]*)
        (?: (?P<colon>:)(?P<inner><=|>=|<|>)? | \s*(?P<operator>!=|<=|>=|==?|<|>)\s* )
    )?
    (?: "(?P<quoted>(?:\\["\\]|[^"])*)"? | (?P<plain>\S+) )
    """,
    re.VERBOSE,
)
_ESCAPED = re.compile(r'\\(["\\])')
_CONNECTIVES: Final = {
    "AND": "All terms must match: leave out AND.",
    "OR": "Terms of one field are alternatives: write precision:fp8 precision:bf16, without OR.",
    "NOT": "Write a minus before a term to exclude it: -tag:x.",
}


@dataclass(frozen=True)
class SearchTerm:
    """One condition: a word if `field` is empty. `text` is the term as it was written."""

    field: str
    operator: Operator
    value: str
    negated: bool
    text: str

    @property
    def is_quoted(self) -> bool:
        """Return whether it is a word in quotes, which means its letters and no state."""
        return not self.field and self.text.removeprefix("-").startswith('"')


@dataclass(frozen=True)
class Query:
    """A parsed search, and what of it could not be understood."""

    terms: tuple[SearchTerm, ...] = ()
    text: str = ""
    problems: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The values of the terms without a field that are not negated."""
        return tuple(term.value for term in self.terms if not term.field and not term.negated)

    def of(self, field: str) -> tuple[SearchTerm, ...]:
        """The terms of a field."""
        return tuple(term for term in self.terms if term.field == field)

    def without(self, field: str) -> Query:
        """The search without the terms of a field."""
        remaining = tuple(term for term in self.terms if term.field != field)
        return replace(self, terms=remaining, text=" ".join(term.text for term in remaining))


Check = Callable[[SearchTerm], "SearchTerm | str"]


def parse(text: str, check: Check | None = None) -> Query:
    """Parse a search; never fails. What is not understood becomes a problem and is left out.

    Args:
        text: as typed; what exceeds MAX_LENGTH is cut off.
        check: returns the term under the canonical name of its field, or the sentence that says what is wrong
            with it. By default `fields.check` without a vocabulary, see there.
    """
    problems: list[str] = []
    text = text.replace("\0", "").strip()
    if len(text) > MAX_LENGTH:
        text = text[:MAX_LENGTH]
        problems.append(f"A search has at most {MAX_LENGTH} characters: the rest was cut off.")
    terms: list[SearchTerm] = []
    for count, match in enumerate(_TERM.finditer(text)):
        if count == MAX_TERMS:
            problems.append(f"Only the first {MAX_TERMS} terms count.")
            break
        term = _term(match)
        if not term.field and not term.value:
            continue
        if not term.field and term.value in _CONNECTIVES and match["quoted"] is None:
            problems.append(_CONNECTIVES[term.value])
        elif isinstance(checked := term if check is None else check(term), str):
            problems.append(checked)
        else:
            terms.append(checked)
    return Query(tuple(terms), text, tuple(problems))


def _term(match: re.Match[str]) -> SearchTerm:
    value = match["plain"] if match["quoted"] is None else _ESCAPED.sub(r"\1", match["quoted"])
    operator = match["operator"] or match["inner"] or ":"
    negated = (match["minus"] is not None) != (operator == "!=")
    if operator in ("=", "==", "!="):
        operator = ":"
    return SearchTerm(match["field"] or "", cast(Operator, operator), value, negated, match[0].strip())


def quoted(value: str) -> str:
    """A value as it is written in a search."""
    if re.fullmatch(r"[^\s\"<>=]+", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def term_text(field: str, value: str) -> str:
    """The text of a term that matches a value of a field."""
    return f"{field}:{quoted(value)}"


def tokens(text: str) -> Iterator[tuple[int, int]]:
    """The start and end of each term in a text."""
    for match in _TERM.finditer(text):
        yield match.span()
