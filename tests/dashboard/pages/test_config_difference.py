"""Which entries of two configurations differ."""

from __future__ import annotations

from typing import Any

from fp8scope_dashboard.pages.config_difference import (
    ABSENT,
    MOST_ENTRIES,
    VALUE_LENGTH,
    Entry,
    difference_of,
    flattened,
)


def test_it_works() -> None:
    mine = {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}, "layers": 12, "precision": "fp8"}
    theirs = {"optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]}, "layers": 12, "seed": 1}
    difference = difference_of(mine, theirs)
    assert difference.differing == [
        Entry("optimizer.lr", "0.0001", "0.0003"),
        Entry("precision", "fp8", ABSENT),
        Entry("seed", ABSENT, "1"),
    ]
    assert [entry.name for entry in difference.equal] == ["layers", "optimizer.betas"]


def test_compares_by_value_and_type() -> None:
    assert not difference_of({"a": 1}, {"a": 1.0}).differing
    for other in ("1", True, None, [1]):
        assert [entry.name for entry in difference_of({"a": 1}, {"a": other}).differing] == ["a"], other
    assert not difference_of({"a": None}, {"a": None}).differing
    # An entry that is null is there; one that is missing is not.
    assert difference_of({"a": None}, {}).differing == [Entry("a", "null", ABSENT)]


def test_empty_objects_are_values() -> None:
    assert flattened({"a": {}, "b": {"c": []}}) == {"a": {}, "b.c": []}


def test_is_bounded() -> None:
    many = {f"key {i:05d}": "x" * 2 * VALUE_LENGTH for i in range(MOST_ENTRIES + 7)}
    difference = difference_of(many, {})
    assert len(difference.differing) == MOST_ENTRIES and difference.left_out == 7
    assert len(difference.differing[0].mine) == VALUE_LENGTH
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"d": deep}
    ((name, _),) = flattened(deep).items()
    assert name.count("d") == 20
