"""A gradient penalty through an FP8 layer raises an error instead of giving wrong results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    MXFP8,
    PRODUCTS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp6Linear,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    convert,
    fp8_layers,
)
from fp8scope_kernels.linear_product import Product

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(),
    CurrentScaling(),
    CurrentScaling(stochastic_gradients=True),
    RowwiseScaling(),
    BlockScaling(),
    BlockScaling(power_of_two=False),
    MXFP8(),
)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)
REFUSAL = "cannot be differentiated twice.*precision = 'bf16'"


def critic(recipe: Recipe, **selection: str) -> nn.Sequential:
    """Linear, GELU, Linear: one of them or both in FP8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    convert(model, recipe, **selection)
    return model


def penalty(run: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean squared norm of the gradient with respect to the input."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    return grad.square().sum(1).mean()


@recipes
@pytest.mark.parametrize("include", ["*", "0", "2"])
def test_it_works(recipe: Recipe, include: str) -> None:
    """Wherever in the model the FP8 layer is: also where no incoming gradient needs a gradient."""
    model = critic(recipe, include=include)
    with pytest.raises(RuntimeError, match=REFUSAL):
        (penalty(model) + model(torch.ones(2, 32)).sum()).backward()


@pytest.mark.parametrize("product", PRODUCTS)
@recipes
def test_with_one_product_in_fp8(recipe: Recipe, product: Product) -> None:
    model = critic(recipe, include="*")
    for _, layer in fp8_layers(model):
        layer.products = (product,)
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.backward(penalty(model))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_hessian_vector_products(training: bool) -> None:
    """Of the weight, and of a bias, whose gradient is a sum of the incoming one."""
    for name in ("0.weight", "0.bias", "2.bias"):
        model = critic(CurrentScaling(), include="*").train(training)
        parameter = model.get_parameter(name)
        with pytest.raises(RuntimeError, match=REFUSAL):
            loss = model(torch.ones(2, 32)).square().sum()
            (grad,) = torch.autograd.grad(loss, parameter, create_graph=True)
            torch.autograd.grad(grad.sum(), parameter)


def test_in_bfloat16_autocast_without_bias_and_recomputed() -> None:
    layer = Fp8Linear(32, 16, bias=False, recipe=DelayedScaling())

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = checkpoint(layer, x, use_reentrant=False)
            return output

    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.backward(penalty(run))


@pytest.mark.parametrize("recipe", [CurrentScaling(), MXFP8()], ids=lambda recipe: recipe.kind)
def test_compiled_layers_are_refused(recipe: Recipe) -> None:
    """Torch itself refuses what it compiles, and the layers are refused where its graphs break."""
    torch.compiler.reset()
    model = critic(recipe, include="*")
    with pytest.raises(RuntimeError, match=f"{REFUSAL}|does not currently support double backward"):
        torch.autograd.backward(penalty(torch.compile(model, backend="aot_eager")))


@pytest.mark.parametrize("allow_unused", [True, False])
def test_refuses_tensors_that_torch_considers_unused(allow_unused: bool) -> None:
    """With a decorator of torch's kind these second derivatives were None."""
    layer = Fp8Linear(32, 16, recipe=CurrentScaling())
    x = torch.ones(2, 32, requires_grad=True)
    for first, second in ((x, layer.weight), (layer.weight, x)):
        with pytest.raises(RuntimeError, match=REFUSAL):
            (grad,) = torch.autograd.grad(layer(x).sum(), first, create_graph=True)
            torch.autograd.grad(grad.sum(), second, allow_unused=allow_unused)


def test_hessians_by_torchs_functions() -> None:
    model = critic(CurrentScaling(), include="*")
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
            lambda x: model(x).square().sum(), torch.ones(1, 32)
        )
    with pytest.raises(RuntimeError):
        torch.func.hessian(lambda x: model(x).square().sum())(torch.ones(1, 32))


def test_two_backward_passes_are_allowed() -> None:
    layer, x = Fp8Linear(32, 16, recipe=CurrentScaling()).eval(), torch.ones(2, 32, requires_grad=True)
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    # Recomputation takes a backward pass within a backward pass.
    x.grad = None
    recomputed: Tensor = checkpoint(layer, x, use_reentrant=True)
    torch.autograd.backward(recomputed.square().sum())
    assert x.grad is not None and torch.equal(x.grad, once)


def test_other_parameters_can_be_differentiated_twice() -> None:
    """A penalty on what lies behind the FP8 layers does not reach them."""
    body, head = Fp8Linear(32, 32, recipe=CurrentScaling()), nn.Linear(32, 1)
    hidden = body(torch.ones(4, 32)).detach().requires_grad_()
    (grad,) = torch.autograd.grad(head(hidden).sum(), hidden, create_graph=True)
    grad.square().sum().backward()
    assert head.weight.grad is not None


def test_in_bf16_second_derivatives_equal_those_of_plain_layers() -> None:
    """The way out that the error names, one layer at a time or all."""
    model, plain = critic(CurrentScaling(), include="*"), critic(CurrentScaling(), exclude="*")
    for _, layer in fp8_layers(model):
        layer.precision = "bf16"
    losses = [penalty(model), penalty(plain)]
    for loss in losses:
        torch.autograd.backward(loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None and theirs.grad.any():
            assert ours.grad is not None
            assert (ours.grad - theirs.grad).norm() < 0.02 * theirs.grad.norm()


def test_fp6_layers_are_differentiable() -> None:
    """Their weight is a constant, and their product an ordinary one."""
    layer = Fp6Linear.from_linear(nn.Linear(32, 16))
    weight = layer.weight.dequantize()
    x = torch.ones(2, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, (2 * weight.T @ weight).sum(1).expand(2, 32))
