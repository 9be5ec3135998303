"""Find the runs that match a search."""

from __future__ import annotations

from django.db.models import Q, QuerySet

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search.fields import any_of, condition_of, in_state, is_alternative
from fp8scope_dashboard.runs.search.language import Query, SearchTerm


def search(runs: QuerySet[Run], query: Query) -> QuerySet[Run]:
    """The runs that match a search (see `fields.read`); archived ones only if it has the field `archived`.

    Equalities of one field are alternatives; all comparisons, negated terms, tags and words must match.
    """
    alternatives: dict[str, list[Q]] = {}
    for term in query.terms:
        if not term.field:
            continue
        if is_alternative(term):
            alternatives.setdefault(term.field, []).append(condition_of(term))
        else:
            condition = condition_of(term)
            runs = runs.filter(~condition if term.negated else condition)
    for conditions in alternatives.values():
        runs = runs.filter(any_of(conditions))
    runs = runs.filter(_words(query))
    return runs if query.of("archived") else runs.filter(archived_at=None)


def _words(query: Query) -> Q:
    words = [term for term in query.terms if not term.field]
    condition = Q()
    for term in words:
        condition &= ~_has(term) if term.negated else _has(term)
    if words and len(words) == len(query.terms) and not any(term.negated for term in words):
        # A tag may have spaces: the search as a whole is one, too.
        condition |= Q(tags__contains=[query.text[:64]])
    return condition


def _has(word: SearchTerm) -> Q:
    value = word.value
    named = Q(name__icontains=value) | Q(group__icontains=value) | Q(tags__contains=[value[:64]])
    state = None if word.is_quoted else in_state(value)
    return named if state is None else named | state
