"""Texts and documents of runs are cleaned and bounded before an agent reads them."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from fp8scope.client.plain_text import JOINER, SELECTORS  # noqa: E402
from fp8scope.mcp_server.run_data import CUT, MAX_NAME, bounded, clean, clean_name, json_number  # noqa: E402


def test_it_works() -> None:
    assert clean("Loss\tis\n3.1", 100) == "Loss\tis\n3.1"
    assert clean_name("gpt fp8\n2") == "gpt fp8\\x0a2"
    assert clean("\x1b[31mred\x1b]0;title\x07", 100) == "\\x1b[31mred\\x1b]0;title\\x07"


@pytest.mark.parametrize(
    "hidden", ["\u202e", "\u200b", "\ufeff", "\U000e0041", "\x9b", "\x00", "\ud800", "\u2028"]
)
def test_characters_that_nobody_sees_are_written_out(hidden: str) -> None:
    cleaned = clean_name(f"a{hidden}b")
    assert hidden not in cleaned and cleaned.startswith("a\\") and cleaned.endswith("b")
    cleaned.encode()


@given(st.text(max_size=2_000), st.integers(0, 600))
def test_no_text_escapes(text: str, limit: int) -> None:
    cleaned = clean(text, limit)
    assert len(cleaned) <= limit + len(CUT)
    harmless = {"\n", "\t", JOINER, *map(chr, SELECTORS)}
    for character in cleaned:
        assert character in harmless or unicodedata.category(character)[0] not in "C"
        assert character in harmless or unicodedata.category(character) not in ("Zl", "Zp")
    assert len(clean_name(text)) <= 10 * (MAX_NAME + len(CUT))


def test_a_cut_text_says_so() -> None:
    assert clean("x" * 11, 10) == "x" * 10 + CUT
    assert clean("x" * 10, 10) == "x" * 10
    # Escapes are longer than what they stand for.
    assert clean("\x1b" * 10, 10).endswith(CUT)


@pytest.mark.parametrize(
    ("value", "written"),
    [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1.5, 1.5), (None, None)],
)
def test_numbers_are_those_of_the_wire(value: float | None, written: object) -> None:
    assert json_number(value) == written


def test_a_small_document_stays_as_it_is() -> None:
    document = {"lr": 1e-3, "layers": [1, 2, {"name": "x"}], "flag": True, "none": None}
    assert bounded(document) == (document, False)


@pytest.mark.parametrize(
    "document",
    [
        {str(number): number for number in range(10_000)},
        {"list": list(range(10_000))},
        {"text": "x" * 100_000},
        {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}},
    ],
    ids=["entries", "items", "characters", "depth"],
)
def test_a_large_document_is_cut(document: dict[str, Any]) -> None:
    part, is_cut = bounded(document)
    assert is_cut and len(json.dumps(part)) < 40_000


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=30,
)


@given(st.dictionaries(st.text(max_size=20), JSON, max_size=10))
def test_every_document_becomes_json(document: dict[str, Any]) -> None:
    part, _ = bounded(document, entries=40, characters=500)
    text = json.dumps(part, ensure_ascii=False, allow_nan=False)
    assert "\x1b" not in text and len(text) < 60_000
