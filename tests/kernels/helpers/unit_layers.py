"""Layers whose products run on FP8 units, and the same on BF16 operands."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import Fp8Linear, Recipe, operands


def make_layer(
    recipe: Recipe, inputs: int = 256, outputs: int = 384, device: torch.device | None = None
) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(inputs, outputs, recipe=recipe, dtype=torch.bfloat16).to(device)


def run(layer: Fp8Linear, tokens: int = 256) -> list[Tensor]:
    """Output and gradients of a call with rows, columns and blocks of very different sizes."""
    draw = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-8, 9, (tokens, 1), generator=draw).float())
    dtype = layer.weight.dtype
    device = layer.weight.device
    x = (torch.randn(tokens, layer.in_features, generator=draw) * sizes).to(device, dtype).requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward((torch.randn(output.shape, generator=draw) * sizes).to(device, dtype))
    assert x.grad is not None and layer.weight.grad is not None
    return [output.detach(), x.grad, layer.weight.grad]


def exact(layer: Fp8Linear, tokens: int = 256) -> list[Tensor]:
    """The same on BF16 operands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "has_fp8_units", lambda *_: False)
        return run(layer, tokens)


def assert_close(seen: list[Tensor], expected: list[Tensor]) -> None:
    """Within three roundings to BF16: one on the units, and two on BF16 operands, of sum and result."""
    for one, other in zip(seen, expected, strict=True):
        assert one.dtype == other.dtype
        bound = other.abs().double() * 3 * 2**-8 + other.abs().max() * 2**-12
        assert ((one.double() - other.double()).abs() <= bound).all()


EVERYWHERE = {"fprop": True, "dgrad": True, "wgrad": True}
