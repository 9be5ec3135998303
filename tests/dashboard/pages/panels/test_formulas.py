"""Formulas of metrics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.pages.panels.formulas import (
    MAX_LENGTH,
    FormulaError,
    evaluate,
    metrics_of,
    parse,
)

VALUES = {
    "a": np.array([1.0, 2.0, 4.0]),
    "b": np.array([2.0, 0.0, -4.0]),
    "train/loss": np.array([1.0, np.e, np.nan]),
    "val loss": np.array([3.0, 3.0, 3.0]),
}


def value(text: str) -> list[float]:
    return np.broadcast_to(evaluate(parse(text, VALUES), VALUES), 3).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [1.0, 2.0, 4.0]),
        ("a + b * 2", [5.0, 2.0, -4.0]),
        ("(a + b) * 2", [6.0, 4.0, 0.0]),
        ("a - 1 - 1", [-1.0, 0.0, 2.0]),
        ("8 / a / 2", [4.0, 2.0, 1.0]),
        ("-a * -2", [2.0, 4.0, 8.0]),
        ("abs(b) + .5e1", [7.0, 5.0, 9.0]),
        ("exp(log(a))", pytest.approx([1.0, 2.0, 4.0])),
        ("train/loss", [1.0, np.e, pytest.approx(np.nan, nan_ok=True)]),
        ("\"val loss\" - 'a'", [2.0, 1.0, -1.0]),
        ("a / b", [0.5, np.inf, -1.0]),
        ("log(b)", pytest.approx([np.log(2.0), -np.inf, np.nan], nan_ok=True)),
    ],
)
def test_it_works(text: str, expected: list[float]) -> None:
    assert value(text) == expected


def test_a_slash_without_spaces_is_part_of_a_name_that_was_logged() -> None:
    assert metrics_of(parse("train/loss", ["train/loss", "train", "loss"])) == {"train/loss"}
    assert metrics_of(parse("train/loss", ["train", "loss"])) == {"train", "loss"}
    assert metrics_of(parse("train / loss", ["train/loss", "train", "loss"])) == {"train", "loss"}
    assert metrics_of(parse("a/train/loss", ["train/loss", "a"])) == {"a", "train/loss"}
    assert metrics_of(parse("eval/loss", ["train"])) == {"eval/loss"}, "a missing metric is named as written"


def test_a_minus_without_spaces_is_part_of_a_name_that_was_logged() -> None:
    assert metrics_of(parse("val-loss - a", ["val-loss", "val", "loss", "a"])) == {"val-loss", "a"}
    assert metrics_of(parse("val-loss", ["val", "loss"])) == {"val", "loss"}
    assert metrics_of(parse("(val-loss)/2", ["val-loss", "val"])) == {"val-loss"}
    assert metrics_of(parse("2*val-loss", ["val-loss"])) == {"val-loss"}


def test_functions_are_names_unless_they_are_called() -> None:
    assert metrics_of(parse("log + exp(abs)", [])) == {"log", "abs"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a +",
        "a b",
        "(a",
        "a)",
        "* a",
        "log()",
        "a ** 2",
        "a; b",
        "__import__('os')(1)",
        "a[0]",
        "1 2",
    ]
    + ["(" * 60 + "a" + ")" * 60, "-" * 60 + "a", "a+" * MAX_LENGTH + "a", "sin(a)", "“a”"],
)
def test_refuses_what_is_no_formula(text: str) -> None:
    with pytest.raises(FormulaError) as error:
        parse(text, VALUES)
    assert str(error.value)


@given(st.text(alphabet="ab/ ()+-*.\"'0123456789e_loxp", max_size=60))
def test_any_text_is_a_formula_or_an_error(text: str) -> None:
    try:
        node = parse(text, VALUES)
    except FormulaError:
        return
    evaluate(node, dict.fromkeys(metrics_of(node), np.ones(2)))


def test_the_longest_formula_is_evaluated() -> None:
    text = "+".join(["a"] * (MAX_LENGTH // 2))
    assert value(text) == pytest.approx([250.0, 500.0, 1000.0])
