"""Recipes: validation, formats per role, and the way to a plain dict and back."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_kernels import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    recipe_from_dict,
)


def test_it_works() -> None:
    recipe = DelayedScaling()
    assert (recipe.history_length, recipe.amax_compute, recipe.margin, recipe.interval) == (16, "max", 0, 1)
    assert recipe.to_dict() == {
        "recipe": "DelayedScaling",
        "fp8_format": "HYBRID",
        "saturate": True,
        "stochastic_gradients": False,
        "nonfinite": "propagate",
        "history_length": 16,
        "amax_compute": "max",
        "margin": 0,
        "interval": 1,
        "reduce_amax": False,
    }


def test_hybrid_is_e4m3_forward_and_e5m2_backward() -> None:
    recipe = CurrentScaling()
    assert recipe.format_of("input") is E4M3
    assert recipe.format_of("weight") is E4M3
    assert recipe.format_of("grad_output") is E5M2
    assert CurrentScaling(fp8_format="E4M3").format_of("grad_output") is E4M3
    assert CurrentScaling(fp8_format="E5M2").format_of("input") is E5M2


def test_the_encoding_is_that_of_the_device_or_of_the_recipe() -> None:
    assert CurrentScaling().format_of("input", torch.device("cpu")) is E4M3
    fnuz = CurrentScaling(fp8_encoding="fnuz")
    assert (fnuz.format_of("input"), fnuz.format_of("grad_output")) == (E4M3FNUZ, E5M2FNUZ)
    assert CurrentScaling(fp8_encoding="ocp").format_of("weight") is E4M3
    # Runs that were stored before there was a choice are equal to those that leave it to the device.
    assert "fp8_encoding" not in CurrentScaling().to_dict()
    assert fnuz.to_dict()["fp8_encoding"] == "fnuz"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="input, weight, grad_output"):
        DelayedScaling().format_of("output")  # type: ignore[arg-type]


recipes: st.SearchStrategy[Recipe] = st.one_of(
    st.builds(
        DelayedScaling,
        history_length=st.integers(1, 1024),
        amax_compute=st.sampled_from(["max", "most_recent"]),
        margin=st.integers(-8, 8),
        interval=st.integers(1, 100),
        fp8_format=st.sampled_from(["HYBRID", "E4M3", "E5M2"]),
        fp8_encoding=st.sampled_from(["device", "ocp", "fnuz"]),
        saturate=st.booleans(),
    ),
    st.builds(CurrentScaling, power_of_two=st.booleans(), margin=st.integers(-8, 8)),
    st.builds(RowwiseScaling, power_of_two=st.booleans()),
    st.builds(BlockScaling, power_of_two=st.booleans()),
    st.builds(MXFP8, rounding=st.sampled_from(["up", "floor"])),
    st.builds(MXFP4, rounding=st.sampled_from(["up", "floor"]), stochastic_gradients=st.booleans()),
    st.builds(NVFP4, hadamard=st.booleans(), stochastic_gradients=st.booleans()),
)


@given(recipes)
def test_round_trip_through_json(recipe: Recipe) -> None:
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'recipe' must be one of"),
        ({"recipe": "Magic"}, "DelayedScaling, CurrentScaling"),
        ({"recipe": ["DelayedScaling"]}, "'recipe' must be one of"),
        ({"recipe": "CurrentScaling", "history_length": 4}, "no field history_length"),
        ({"recipe": "DelayedScaling", "history_length": 0}, "history_length must be a whole number from 1"),
        ({"recipe": "DelayedScaling", "history_length": 10**9}, "history_length must be a whole number"),
        ({"recipe": "DelayedScaling", "history_length": 2.5}, "history_length must be a whole number"),
        ({"recipe": "DelayedScaling", "interval": True}, "interval must be a whole number"),
        ({"recipe": "DelayedScaling", "margin": 65}, "margin must be a whole number from -64 to 64"),
        ({"recipe": "DelayedScaling", "amax_compute": "mean"}, "max, most_recent"),
        ({"recipe": "DelayedScaling", "fp8_format": "E3M4"}, "HYBRID, E4M3, E5M2"),
        ({"recipe": "CurrentScaling", "fp8_encoding": "ieee"}, "device, ocp, fnuz"),
        ({"recipe": "CurrentScaling", "power_of_two": 1}, "power_of_two must be True or False"),
        ({"recipe": "MXFP8", "rounding": "nearest"}, "up, floor"),
        ({"recipe": "MXFP8", "fp8_format": "E2M1"}, "HYBRID, E4M3, E5M2"),
        ({"recipe": "NVFP4", "fp8_format": "E4M3"}, "must be one of E2M1"),
        ({"recipe": "NVFP4", "hadamard": 1}, "hadamard must be True or False"),
        ({"recipe": "MXFP4", "saturate": False}, "always saturates"),
        ({"recipe": "BlockScaling", "power_of_two": None}, "power_of_two must be True or False"),
        ({"recipe": "CurrentScaling", "saturate": "yes"}, "saturate must be True or False"),
    ],
)
def test_bad_values_are_refused_with_what_to_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from_dict(values)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 1  # type: ignore[misc]
