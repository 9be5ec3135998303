"""A layer's three products, switched between FP8 and BF16 one by one."""

import copy
import itertools
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    MXFP8,
    PRODUCTS,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Product,
    Recipe,
    RowwiseScaling,
)

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(history_length=4),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "mx": MXFP8(),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def make_layer(recipe: Recipe) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(64, 32, recipe=recipe)


def passes(layer: Fp8Linear, products: Collection[Product] | None) -> dict[str, Tensor]:
    """What the three products of a fresh copy come to, by the product's name."""
    layer = copy.deepcopy(layer)
    layer.products = products
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    output = layer(x)
    # A gradient of its own: dgrad and wgrad then do not depend on what fprop is computed in.
    output.backward(torch.randn(48, 32, generator=torch.Generator().manual_seed(2)))
    assert x.grad is not None and layer.weight.grad is not None
    return {"fprop": output.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}


@recipes
def test_it_works(recipe: Recipe) -> None:
    """Each product is exactly the FP8 layer's where it is chosen, and exactly BF16's where it is not."""
    layer = make_layer(recipe)
    fp8, bf16 = passes(layer, None), passes(layer, ())
    assert all(not torch.equal(fp8[name], bf16[name]) for name in PRODUCTS)
    for count in range(4):
        for chosen in itertools.combinations(PRODUCTS, count):
            found = passes(layer, chosen)
            for name in PRODUCTS:
                assert torch.equal(found[name], (fp8 if name in chosen else bf16)[name]), (chosen, name)


def test_without_fp8_products_it_equals_the_bf16_layer() -> None:
    layer = make_layer(CurrentScaling())
    mixed = passes(layer, ())
    layer.precision = "bf16"
    plain = passes(layer, None)
    torch.testing.assert_close(mixed["fprop"], plain["fprop"], rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(mixed["wgrad"], plain["wgrad"], rtol=2**-6, atol=0.05)


def test_bf16_precision_overrides_products() -> None:
    layer = make_layer(CurrentScaling())
    layer.precision = "bf16"
    assert torch.equal(passes(layer, PRODUCTS)["fprop"], passes(layer, ())["fprop"])


@pytest.mark.parametrize(
    ("products", "advanced"),
    [
        ((), ()),
        (("fprop",), ("input", "weight")),
        (("dgrad",), ("weight", "grad_output")),
        (("wgrad",), ("input", "grad_output")),
    ],
    ids=str,
)
def test_only_quantised_tensors_advance_their_state(
    products: tuple[Product, ...], advanced: tuple[str, ...]
) -> None:
    layer = make_layer(DelayedScaling())
    layer.products = products
    layer(torch.randn(16, 64, requires_grad=True)).sum().backward()
    calls = {role: layer.state_of(role).calls for role in ("input", "weight", "grad_output")}
    assert calls == {role: int(role in advanced) for role in calls}
    layer.eval()
    layer(torch.randn(16, 64, requires_grad=True)).sum().backward()
    assert calls == {role: layer.state_of(role).calls for role in calls}  # type: ignore[arg-type]


def test_frozen_parameters_and_no_bias() -> None:
    layer = Fp8Linear(32, 32, bias=False, recipe=CurrentScaling())
    layer.weight.requires_grad_(False)
    layer.products = PRODUCTS[1:2]
    x = torch.randn(2, 3, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer.products = PRODUCTS[2:]
    layer(torch.randn(4, 32)).sum().backward()
    assert layer.weight.grad is not None


def test_products_can_be_reset_and_are_validated() -> None:
    layer = make_layer(CurrentScaling())
    assert layer.products is None
    layer.products = "wgrad"  # type: ignore[assignment]
    assert layer.products == frozenset(("wgrad",)) == copy.deepcopy(layer).products
    layer.products = None
    assert torch.equal(passes(layer, None)["fprop"], passes(layer, PRODUCTS)["fprop"])
    with pytest.raises(ValueError, match=r"products must be among fprop, dgrad, wgrad, got 'forward'"):
        layer.products = ["forward"]  # type: ignore[list-item]
