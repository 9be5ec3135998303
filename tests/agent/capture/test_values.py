"""Numbers, names and nested mappings in the arguments of trackers' functions."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.capture.descriptions import from_text, host_values
from fp8scope.capture.names import recorded_name
from fp8scope.capture.values import NotANumberError, count_of, flattened, key_of, number_of, same
from fp8scope.step import SCALAR_NAME


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1.5, 1.5),
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.array([[7]]), 7.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([2.5], dtype=torch.bfloat16), 2.5),
        (Decimal("0.25"), 0.25),
        (math.inf, math.inf),
    ],
)
def test_it_works(value: Any, number: float) -> None:
    assert number_of(value) == number and type(number_of(value)) is float


@pytest.mark.parametrize(
    "value", ["1.5", b"1", None, [1.0], (1,), np.zeros(3), torch.zeros(2), object(), 1j, np.array(["1"]), {1}]
)
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(NotANumberError):
        number_of(value)


def test_a_number_of_a_graph_is_taken_without_it() -> None:
    """A value that waits would keep the activations of its step."""
    loss = torch.ones(1, requires_grad=True).sum()
    assert number_of(loss) == 1.0
    meta = number_of(torch.ones((), device="meta", requires_grad=True))
    assert isinstance(meta, torch.Tensor) and not meta.requires_grad


def test_nan_is_the_same_as_nan_and_tensors_by_their_memory() -> None:
    assert same(math.nan, float("nan")) and not same(1.0, math.nan) and not same(1.0, None)
    value = torch.ones(())
    assert key_of(value) == key_of(value.detach()) != key_of(torch.ones(()) + 0)
    before = key_of(value)
    value += 1
    assert key_of(value) != before


def test_nested_mappings_are_flattened_by_the_trackers_separator() -> None:
    nested = {"val": {"loss": 1, "by": {"task": 2}}, 3: 4}
    assert dict(flattened(nested, ".")) == {"val.loss": 1, "val.by.task": 2, "3": 4}
    endless: dict[str, Any] = {}
    endless["again"] = endless
    assert len(list(flattened(endless, "/"))) == 1


@pytest.mark.parametrize(
    ("step", "count"),
    [(7, 7), (np.int64(7), 7), (torch.tensor(7), 7), (7.9, 7), (None, None), ("7", None), (math.nan, None)]
    + [(math.inf, None), (2**60, None), (-3, -3)],
)
def test_steps_of_any_type(step: Any, count: int | None) -> None:
    assert count_of(step) == count


@given(st.text(max_size=300), st.booleans())
def test_every_name_becomes_one_that_the_server_takes(name: str, follows: bool) -> None:
    assert SCALAR_NAME.fullmatch(recorded_name(name, follows=follows))


@pytest.mark.parametrize(
    ("name", "led", "followed"),
    [
        ("train/loss", "train/loss", "train/loss"),
        ("loss", "loss", "logged/loss"),
        ("learning_rate", "learning_rate", "logged/learning_rate"),
        ("tokens", "logged/tokens", "logged/tokens"),
        ("gpu_memory", "logged/gpu_memory", "logged/gpu_memory"),
        ("lm loss vs samples", "lm_loss_vs_samples", "lm_loss_vs_samples"),
    ],
)
def test_names_with_a_fixed_meaning_are_kept_apart(name: str, led: str, followed: str) -> None:
    assert recorded_name(name, follows=False) == led and recorded_name(name, follows=True) == followed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.05", 0.05),
        ("3", 3),
        ("True", True),
        ("None", None),
        ("Adam", "Adam"),
        ("1e-3", "1e-3"),
        ("[1]", "[1]"),
    ]
    + [("007", "007"), ("", ""), ("NaN", "NaN")],
)
def test_a_parameter_that_was_made_a_text_is_read_back(text: str, value: Any) -> None:
    assert from_text(text) == value and type(from_text(text)) is type(value)


def test_a_configuration_does_not_wait_for_a_device() -> None:
    values = {"lr": torch.ones((), device="meta"), "nested": {"n": 1}, 2: "two"}
    assert host_values(values) == {"lr": "<Tensor on meta>", "nested": {"n": 1}, "2": "two"}
