"""Fp8Linear under block recipes: each product against float64 products of its own quantised operands."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    MXFP8,
    STATISTICS,
    BlockScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    observe,
    quantize_blocks,
)
from fp8scope_kernels.recipes import Role

RECIPES: dict[str, Recipe] = {
    "rowwise": RowwiseScaling(),
    "rowwise, hybrid, power of two": RowwiseScaling(power_of_two=True),
    "block": BlockScaling(),
    "block, float32 scales": BlockScaling(power_of_two=False),
    "MX": MXFP8(),
    "MX, floor": MXFP8(rounding="floor"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(x: Tensor, recipe: Recipe, role: Role) -> Tensor:
    """The matrix as the layer is said to multiply it, the dimension summed over last: float64."""
    grid = recipe.block_of(role)
    assert grid is not None
    return quantize_blocks(x, recipe.format_of(role), grid, recipe).dequantize().double()


def assert_close(actual: Tensor, exact: Tensor) -> None:
    """Within BF16's rounding of the product, and float32's of the sum."""
    bound = exact.abs() * 2 * 2**-8 + exact.abs().max() * 2**-18
    assert ((actual.double() - exact).abs() <= bound).all()


@recipes
@pytest.mark.parametrize("tokens", [256, 50])
def test_it_works(recipe: Recipe, tokens: int) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(160, 144, bias=False, recipe=recipe)
    x, grad = randn(tokens, 160, seed=1).requires_grad_(), randn(tokens, 144, seed=2)
    output = layer(x)
    output.backward(grad)
    weight, data = layer.weight.detach(), x.detach()
    assert x.grad is not None and layer.weight.grad is not None
    assert_close(output.detach(), quantized(data, recipe, "input") @ quantized(weight, recipe, "weight").t())
    assert_close(x.grad, quantized(grad, recipe, "grad_output") @ quantized(weight.t(), recipe, "weight").t())
    assert_close(
        layer.weight.grad,
        quantized(grad.t(), recipe, "grad_output") @ quantized(data.t(), recipe, "input").t(),
    )


@recipes
def test_one_large_row_does_not_flush_the_others(recipe: Recipe) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(128, 32, bias=False, recipe=recipe)
    x = randn(4, 128, seed=3)
    x[0] *= 1e6
    exact = nn.functional.linear(x, layer.weight)
    error = (layer(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.1


@recipes
def test_counts_each_tensor_once_with_its_blocks(recipe: Recipe) -> None:
    layer = Fp8Linear(128, 128, recipe=recipe)
    buffer = StatisticsBuffer()
    observe(layer, buffer)
    for use_checkpoint in (False, True):
        x = randn(64, 128, seed=4).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if use_checkpoint else layer(x)
        y.square().mean().backward()
    numel = STATISTICS.index("numel")
    assert buffer.data[:, numel].tolist() == [2 * 64 * 128, 2 * 128 * 128, 2 * 64 * 128]
    blocks = buffer.block_data[:, BLOCK_STATISTICS.index("blocks")]
    for info, count in zip(buffer.catalogue, blocks.tolist(), strict=True):
        height, width = recipe.block_of(info.role) or (0, 0)  # type: ignore[arg-type]
        rows = 128 if info.role == "weight" else 64
        assert count == 2 * (rows // height) * (128 // (width or 128))
    buffer.zero_()
    assert torch.count_nonzero(buffer.block_data) == 0


@recipes
def test_no_tokens(recipe: Recipe) -> None:
    layer = Fp8Linear(32, 16, recipe=recipe)
    x = torch.empty(2, 0, 32, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and torch.count_nonzero(layer.weight.grad) == 0


def test_it_learns() -> None:
    torch.manual_seed(0)
    x, target = randn(256, 32, seed=5), randn(256, 16, seed=6)
    losses = {}
    for name, recipe in RECIPES.items():
        torch.manual_seed(1)
        model = nn.Sequential(Fp8Linear(32, 64, recipe=recipe), nn.ReLU(), Fp8Linear(64, 16, recipe=recipe))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        losses[name] = loss.item()
    assert max(losses.values()) < 0.8
    assert max(losses.values()) - min(losses.values()) < 0.05
