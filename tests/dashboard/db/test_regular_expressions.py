"""Regular expressions of people, matched by PostgreSQL."""

from __future__ import annotations

import time

import pytest
from django.db import connection

from fp8scope_dashboard.db.regular_expressions import MAX_LENGTH, PatternError, matching

NAMES = ["train/loss", "eval/loss", "Grad norm", "lr"]

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("loss$", ["train/loss", "eval/loss"]),
        ("^train/", ["train/loss"]),
        ("(?i)grad", ["Grad norm"]),
        (r"\s|^l.$", ["Grad norm", "lr"]),
        ("nothing", []),
    ],
)
def test_it_works(pattern: str, expected: list[str]) -> None:
    assert matching(NAMES, pattern) == expected


@pytest.mark.parametrize("pattern", ["(", "[a", "a{3,1}", "*a", "x" * (MAX_LENGTH + 1)])
def test_says_what_is_wrong(pattern: str) -> None:
    with pytest.raises(PatternError) as error:
        matching(NAMES, pattern)
    assert "regular expression" in str(error.value)


def timeout() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('statement_timeout')")
        return str(cursor.fetchone()[0])


def test_an_expression_that_takes_too_long_ends() -> None:
    before = timeout()
    begin = time.monotonic()
    with pytest.raises(PatternError):
        # Back references make every engine search.
        matching(["a" * 500 + "b"] * 1_000, r"^(a+)(a+)(a+)(a+)\1\2\3\4\1\2\3\4\1\2\3b$")
    assert time.monotonic() - begin < 30, "without its limit the search takes hours"
    assert timeout() == before
    assert matching(NAMES, "lr") == ["lr"], "the transaction goes on"
