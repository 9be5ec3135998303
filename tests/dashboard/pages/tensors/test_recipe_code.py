"""The Python lines of a proposal do what they say, on a real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8scope
from fp8scope_dashboard.analysis.what_if.targets import TARGET_FORMATS, make_target
from fp8scope_dashboard.pages.tensors.recipe_code import recipe_code
from fp8scope_kernels import Fp8Linear


def model() -> nn.Module:
    layers = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
    return nn.ModuleDict({"mlp": layers})


def recipe_after(code: str) -> Any:
    """Run the code on a model; returns the recipe of the layer `mlp.up`."""
    converted = model()
    exec(code, {"model": converted})
    assert isinstance(converted.get_submodule("mlp.down"), nn.Linear)
    assert not isinstance(converted.get_submodule("mlp.down"), Fp8Linear)
    layer = converted.get_submodule("mlp.up")
    assert isinstance(layer, Fp8Linear)
    return layer.recipe


def test_it_works() -> None:
    code = recipe_code("mlp.up", "input", make_target("e4m3"), {"recipe": "DelayedScaling"}, 2)
    assert recipe_after(code) == fp8scope.DelayedScaling(fp8_format="HYBRID", margin=2)


@pytest.mark.parametrize(
    ("format", "role", "options", "recipe", "expected"),
    [
        ("hybrid", "weight", {}, {}, fp8scope.DelayedScaling(margin=3)),
        ("e5m2", "grad_output", {}, {}, fp8scope.DelayedScaling(margin=3)),
        ("e4m3", "grad_output", {}, {}, fp8scope.DelayedScaling(fp8_format="E4M3", margin=3)),
        (
            "e5m2",
            "input",
            {},
            {"recipe": "CurrentScaling"},
            fp8scope.CurrentScaling(fp8_format="E5M2", margin=3),
        ),
        ("hybrid", "input", {"scaling": "row"}, {}, fp8scope.RowwiseScaling()),
        (
            "hybrid",
            "input",
            {"scaling": "block", "block": 128},
            {},
            fp8scope.BlockScaling(fp8_format="HYBRID", power_of_two=False),
        ),
        ("mxfp8", "input", {}, None, fp8scope.MXFP8()),
        ("mxfp4", "weight", {}, {}, fp8scope.MXFP4()),
        ("nvfp4", "grad_output", {}, {}, fp8scope.NVFP4()),
    ],
)
def test_makes_the_layer_of_the_proposal(
    format: str, role: str, options: dict[str, Any], recipe: Any, expected: Any
) -> None:
    assert recipe_after(recipe_code("mlp.up", role, make_target(format, **options), recipe, 3)) == expected


@pytest.mark.parametrize("format", ["e3m2", "e2m3", "mxfp6", "e2m1"])
def test_formats_without_layers_have_no_code(format: str) -> None:
    assert format in TARGET_FORMATS
    assert recipe_code("mlp.up", "input", make_target(format), {}, 0) == ""


def test_blocks_that_no_layer_has_have_no_code() -> None:
    assert recipe_code("mlp.up", "input", make_target("hybrid", "block", block=32), {}, 0) == ""


@pytest.mark.parametrize("module", ["", "a b", "x'); evil('", "a[0]", "*", "a\nb"])
def test_a_name_that_is_a_pattern_or_code_has_no_code(module: str) -> None:
    assert recipe_code(module, "input", make_target("hybrid"), {}, 0) == ""


def test_the_converted_layer_computes() -> None:
    converted = model()
    exec(recipe_code("mlp.up", "input", make_target("hybrid"), {}, 2), {"model": converted})
    assert torch.isfinite(converted.get_submodule("mlp.up")(torch.randn(16, 32))).all()
