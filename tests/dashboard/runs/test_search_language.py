"""The grammar of a search, and the sentences about what is wrong with one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.runs.search import FIELDS, MAX_LENGTH, MAX_TERMS, Query, Vocabulary, parse, read
from fp8scope_dashboard.runs.search.language import quoted, term_text

VOCABULARY = Vocabulary(("loss", "lr", "train/acc"), ("lr", "model.depth", "data.depth", "optimizer.name"))


def terms(text: str) -> list[tuple[str, str, str, bool]]:
    return [(term.field, term.operator, term.value, term.negated) for term in read(text, VOCABULARY).terms]


def problems(text: str) -> str:
    return " ".join(read(text, VOCABULARY).problems)


def test_it_works() -> None:
    assert terms('precision:fp8 loss<2.5 -tag:"two words" gpt') == [
        ("precision", ":", "fp8", False),
        ("loss", "<", "2.5", False),
        ("tag", ":", "two words", True),
        ("", ":", "gpt", False),
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("  ", []),
        ('"', []),
        ("a:", [("", ":", "a:", False)]),
        (":a", [("", ":", ":a", False)]),
        ("12:30", [("", ":", "12:30", False)]),
        ("-", [("", ":", "-", False)]),
        (r'name:"say \"hi\" C:\\x"', [("name", ":", 'say "hi" C:\\x', False)]),
        (r'name:"C:\data"', [("name", ":", r"C:\data", False)]),
        ("started>2026-10-01", [("created", ">", "2026-10-01", False)]),
        ("-gpt", [("", ":", "gpt", True)]),
        ('-"a b"', [("", ":", "a b", True)]),
        ('group:"open', [("group", ":", "open", False)]),
        ('group:""', [("group", ":", "", False)]),
        ("Precision:FP8", [("precision", ":", "FP8", False)]),
        ("step >= 100", [("step", ">=", "100", False)]),
        ("step:>100", [("step", ">", "100", False)]),
        ("seed=3", [("seed", ":", "3", False)]),
        ("seed==3", [("seed", ":", "3", False)]),
        ("seed!=3", [("seed", ":", "3", True)]),
        ("-seed!=3", [("seed", ":", "3", False)]),
        ("train/acc>0.5", [("scalar.train/acc", ">", "0.5", False)]),
        ("scalar.new<1", [("scalar.new", "<", "1", False)]),
        ("name:adam", [("name", ":", "adam", False)]),
        ("optimizer.name:adam*", [("config.optimizer.name", ":", "adam*", False)]),
        ("config.model.depth:12", [("config.model.depth", ":", "12", False)]),
        ("recipe.power_of_two:true", [("recipe.power_of_two", ":", "true", False)]),
    ],
)
def test_terms(text: str, wanted: list[tuple[str, str, str, bool]]) -> None:
    assert terms(text) == wanted
    assert problems(text) == ""


def test_a_name_is_a_scalar_before_it_is_a_configuration_key() -> None:
    assert terms("lr>1e-4") == [("scalar.lr", ">", "1e-4", False)]
    assert terms("config.lr>1e-4") == [("config.lr", ">", "1e-4", False)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("color:red", "There is no field “color”."),
        ("color:red", "config.color"),
        ("recip:delayed", "Did you mean recipe"),
        ("depth:12", "“depth” may be config.model.depth or config.data.depth"),
        ("loss<abc", "“loss<abc”: after loss< write a number, such as 2.5"),
        ("step>1.5", "write a whole number"),
        ("duration>2", "write a duration with its unit, such as 30min"),
        ("duration:2h", "write a comparison"),
        ("created>7d", "age<7d"),
        ("created>2026-13-01", "write a date such as 2026-10-01"),
        ("state:failled", "write one of running, finished, failed, silent"),
        ("precision<fp8", "precision has no order. Write precision:fp8."),
        ("archived:maybe", "one of yes, no, all"),
        ("id:xyz", "beginning of a run's id"),
        ("a OR b", "without OR"),
        ("a AND b", "leave out AND"),
        ("seed:1e30", "a whole number"),
        ("age<9999999d", "at most 100 years"),
    ],
)
def test_problems_say_what_to_write(text: str, sentence: str) -> None:
    assert sentence in problems(text)


def test_what_is_not_understood_is_left_out() -> None:
    query = read("color:red fp8 loss<abc")
    assert query.words == ("fp8",) and len(query.terms) == 1 and len(query.problems) == 2


def test_searches_are_bounded() -> None:
    query = parse(" ".join("abc" for _ in range(100)))
    assert len(query.words) == MAX_TERMS and query.problems == (f"Only the first {MAX_TERMS} terms count.",)
    long = parse("x" * 10_000)
    assert len(long.words[0]) == MAX_LENGTH and "cut off" in long.problems[0]


def test_without_leaves_the_other_terms_as_they_were_written() -> None:
    query = read('precision:fp8  tag:"a b" -precision:bf16 gpt')
    assert query.without("precision").text == 'tag:"a b" gpt'


@given(st.text(max_size=120))
def test_any_text_is_a_search(text: str) -> None:
    query = read(text, VOCABULARY)
    assert isinstance(query, Query)
    assert all(not term.field or term.field in FIELDS or "." in term.field for term in query.terms)


@given(st.text(min_size=1, max_size=60).map(lambda text: text.replace('"', "").replace("\0", "").strip()))
def test_a_quoted_value_is_read_back(value: str) -> None:
    (term,) = parse(term_text("tag", value)).terms
    assert (term.field, term.operator, term.value, term.negated) == ("tag", ":", value, False), quoted(value)


@given(st.sampled_from(["<", "<=", ">", ">="]), st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_can_be_compared_with(operator: str, value: float) -> None:
    (term,) = read(f"loss{operator}{value!r}").terms
    assert (term.operator, float(term.value)) == (operator, value)


@given(st.lists(st.sampled_from(["precision:fp8", "-tag:x", "loss<2.5", "gpt", 'group:"a b"', "seed:1"])))
def test_the_text_of_the_terms_is_the_same_search(parts: list[str]) -> None:
    query = read(" ".join(parts))
    assert read(" ".join(term.text for term in query.terms)).terms == query.terms


@pytest.mark.parametrize("text", ["loss<", "-tag:", "tag:", "created>", "lr<", "model.depth:", "seed!="])
def test_a_term_without_a_value_is_no_word(text: str) -> None:
    """Somebody is still typing it: a search for the word would find nothing."""
    assert terms(f"gpt {text}") == [("", ":", "gpt", False)]
    assert f"“{text}” has no value." in problems(f"gpt {text}")


def test_a_quoted_term_without_a_value_is_a_word() -> None:
    assert terms('"loss<" "tag:"') == [("", ":", "loss<", False), ("", ":", "tag:", False)]


def test_words_of_the_pages_find_their_field_unless_a_run_logs_them() -> None:
    assert terms("steps>10") == [("step", ">", "10", False)]
    own = Vocabulary(("steps",), ())
    assert [term.field for term in read("steps>10", own).terms] == ["scalar.steps"]


@given(st.text(max_size=40).filter(lambda text: "\0" not in text))
def test_any_value_can_be_written(value: str) -> None:
    (term,) = read(term_text("config.x", value)).terms
    assert term.field == "config.x" and term.value == value
