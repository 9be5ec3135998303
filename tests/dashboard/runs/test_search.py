"""The query of the list of runs."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import make_run
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.runs.search import MAX_TERMS, Query, parse, search

DELAYED = {"recipe": "DelayedScaling", "margin": 2, "fp8_format": "HYBRID", "reduce_amax": True}


def test_it_works() -> None:
    query = parse('precision:fp8 Recipe:delayed gpt tag:"two words" tag:x "small run"')
    assert query.terms == {"precision": ("fp8",), "recipe": ("delayed",), "tag": ("two words", "x")}
    assert query.words == ("gpt", "small run") and query.problems == ()


@pytest.mark.parametrize(
    ("text", "words", "terms"),
    [
        ("", (), {}),
        ("  ", (), {}),
        ("a:", ("a:",), {}),
        (":a", (":a",), {}),
        ('"', (), {}),
        ('group:"open', (), {"group": ("open",)}),
        ("12:30", ("12:30",), {}),
        ("state:failed state:silent", (), {"state": ("failed", "silent")}),
        ("recipe.power_of_two:true", (), {"recipe.power_of_two": ("true",)}),
    ],
)
def test_odd_queries(text: str, words: tuple[str, ...], terms: dict[str, tuple[str, ...]]) -> None:
    query = parse(text)
    assert (tuple(word for word in query.words if word), dict(query.terms)) == (words, terms)


def test_unknown_fields_are_a_problem() -> None:
    query = parse("color:red fp8")
    assert query.words == ("fp8",) and not query.terms
    assert query.problems[0].startswith("There is no field “color”. Fields: precision, recipe,")


def test_queries_are_bounded() -> None:
    query = parse(" ".join("abcdefgh" for _ in range(100)))
    assert len(query.words) == MAX_TERMS and query.problems == (f"Only the first {MAX_TERMS} terms count.",)
    assert len(parse("x" * 10_000).words[0]) == 300


@pytest.fixture
def runs(db: None) -> dict[str, Run]:
    project = Project.objects.create(slug="default", name="Default")
    fp8 = {"precision": "fp8", "recipe": DELAYED, "recipe_name": "DelayedScaling", "baseline": "bf16"}
    return {
        "delayed": make_run(project, "gpt small", group="fp8-d", tags=["two words", "x"], seed=3, **fp8),
        "mxfp8": make_run(
            project, "GPT large", precision="fp8", recipe_name="MXFP8", recipe={"recipe": "MXFP8"}, tags=["x"]
        ),
        "shadow": make_run(
            project,
            "bf16",
            precision="bf16",
            group="bf16",
            recipe_name="shadow:DelayedScaling",
            recipe={"shadow": DELAYED},
            state=RunState.FAILED,
        ),
    }


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", "delayed mxfp8 shadow"),
        ("precision:FP8", "delayed mxfp8"),
        ("precision:fp8 precision:bf16", "delayed mxfp8 shadow"),
        ("recipe:delayed", "delayed"),
        ("recipe:shadow", "shadow"),
        ("recipe:DelayedScaling margin:2", "delayed"),
        ("margin:2", "delayed shadow"),
        ("margin:3", ""),
        ("format:hybrid", "delayed shadow"),
        ("recipe.reduce_amax:true precision:fp8", "delayed"),
        ("state:failed", "shadow"),
        ("state:nonsense", ""),
        ("group:fp8-d", "delayed"),
        ("baseline:bf16", "delayed"),
        ("seed:3", "delayed"),
        ("seed:99999999999999999999", ""),
        ("tag:x", "delayed mxfp8"),
        ('tag:x tag:"two words"', "delayed"),
        ("two words", "delayed"),
        ("gpt", "delayed mxfp8"),
        ("gpt large", "mxfp8"),
        ("gpt precision:bf16", ""),
        ("FP8-d", "delayed"),
        ("color:red gpt large", "mxfp8"),
        ("100%", ""),
    ],
)
def test_matches(runs: dict[str, Run], text: str, matches: str) -> None:
    wanted = {runs[name].pk for name in matches.split()}
    assert set(search(Run.objects.all(), parse(text)).values_list("pk", flat=True)) == wanted


@given(st.text(max_size=80))
def test_any_text_is_a_query(text: str) -> None:
    query = parse(text)
    assert isinstance(query, Query)
    assert all(name == name.lower() for name in query.terms)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "text", ["%_\\", "recipe.a:{", "margin:NaN", "margin:1e999", "\0", "seed:-0x1", "'; --"]
)
def test_the_database_takes_any_query(text: str) -> None:
    assert list(search(Run.objects.all(), parse(text))) == []
