"""Search a project's runs: `precision:fp8 loss<2.5 -tag:x config.lr>=1e-4 text`; see docs/browsing.md."""

from fp8scope_dashboard.runs.search.conditions import search
from fp8scope_dashboard.runs.search.fields import FIELDS, PREFIXES, read
from fp8scope_dashboard.runs.search.language import MAX_LENGTH, MAX_TERMS, Query, SearchTerm, parse
from fp8scope_dashboard.runs.search.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "FIELDS",
    "MAX_LENGTH",
    "MAX_TERMS",
    "PREFIXES",
    "Query",
    "SearchTerm",
    "Vocabulary",
    "parse",
    "read",
    "search",
    "vocabulary_of",
]
