"""What of a table is new, by what the server has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp8scope.importing.model import SourceTensor, ValueTable
from fp8scope.importing.stored import StoredValues

TABLE = ValueTable(
    steps=np.array([0, 1, 2]),
    times=np.array([10, 11, 12]),
    scalars={"a": np.array([1.0, 2.0, 3.0]), "b": np.array([4.0, 5.0, 6.0])},
    missing={"b": np.array([True, False, False])},
)
TENSORS = replace(
    TABLE,
    scalars={},
    missing={},
    statistics={"amax": np.array([[1.0], [2.0], [3.0]])},
    tensors=(SourceTensor(name="x.input"),),
)


def stored(**changes: Any) -> StoredValues:
    values: dict[str, Any] = {
        "scalars": {},
        "evaluations": frozenset(),
        "attempts": {0: 0},
        "ranks": {0: 1},
        "last_step": 1,
        "state": "finished",
        "unreported_rows": 0,
        "unreported_points": 0,
    }
    return StoredValues(**{**values, **changes})


def steps_of(table: ValueTable | None) -> list[int]:
    return [] if table is None else table.steps.tolist()


def test_it_works() -> None:
    rest = stored(scalars={"a": np.array([0, 1])}).rest_of(TABLE, 0)
    assert rest is not None and rest.steps.tolist() == [1, 2]
    assert rest.missing["a"].tolist() == [True, False] and rest.missing["b"].tolist() == [False, False]
    assert rest.times is not None and rest.times.tolist() == [11, 12]


def test_columns_that_are_stored_are_left_out() -> None:
    rest = stored(scalars={"a": np.array([0, 1, 2]), "b": np.array([1])}).rest_of(TABLE, 0)
    assert steps_of(rest) == [2] and rest is not None and rest.scalars.keys() == {"b"}
    whole = {"a": np.array([0, 1, 2]), "b": np.array([0, 1, 2])}
    assert stored(scalars=whole).rest_of(TABLE, 0) is None


def test_tensors_are_new_beyond_the_last_step() -> None:
    rest = stored().rest_of(TENSORS, 0)
    assert steps_of(rest) == [2] and rest is not None and rest.statistics["amax"].tolist() == [[3.0]]
    assert stored(last_step=2).rest_of(TENSORS, 0) is None


def test_a_start_that_is_not_stored_is_new() -> None:
    whole = {"a": np.array([0, 1, 2]), "b": np.array([0, 1, 2])}
    assert stored(scalars=whole).rest_of(TABLE, 1) is TABLE


def test_what_a_later_start_went_back_before_is_not_sent_again() -> None:
    assert steps_of(stored(attempts={0: 0, 1: 1}).rest_of(TABLE, 0)) == [0]
    assert stored(attempts={0: 0, 1: 0}).rest_of(TABLE, 0) is None
    assert steps_of(stored(attempts={0: 0, 1: None}).rest_of(TABLE, 0)) == [0, 1, 2]


def test_each_of_several_ranks_has_its_own_end() -> None:
    values = stored(scalars={"a": np.array([0, 1, 2])}, ranks={0: 2, 1: 0}, last_step=2)
    assert steps_of(values.rest_of(replace(TENSORS, rank=1), 0)) == [1, 2]
    assert values.rest_of(TENSORS, 0) is None
    assert steps_of(values.rest_of(replace(TENSORS, rank=2), 0)) == [0, 1, 2]
