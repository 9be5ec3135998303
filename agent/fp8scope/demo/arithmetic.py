"""BF16 arithmetic on a CPU, with BF16 units or, on CPUs without them, emulated on FP32 units.

A BF16 matrix product multiplies BF16 numbers, accumulates in FP32 and rounds the sum to BF16. FP32 units give
the same numbers if the operands are rounded to BF16 first. On a CPU without BF16 units this is an order of
magnitude faster than torch's BF16 products.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional


@cache
def has_units() -> bool:
    """Return whether this CPU multiplies BF16 matrices in hardware, as far as torch can tell."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(name.endswith("bf16") and value for name, value in capabilities.items())


def describe() -> str:
    """Describe the arithmetic in use, for the run's configuration."""
    return "BF16 units (autocast)" if has_units() else "BF16 operands on FP32 units"


def bf16() -> AbstractContextManager[object]:
    """Return the context in which to run a prepared model."""
    return torch.autocast("cpu", torch.bfloat16) if has_units() else nullcontext()


def prepare(model: nn.Module) -> int:
    """Make plain linear layers round their operands to BF16, in place, if the CPU has no BF16 units.

    Returns the number of layers changed.
    """
    if has_units():
        return 0
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    for module in plain:
        module.__class__ = RoundedLinear
    return len(plain)


class RoundedLinear(nn.Linear):
    """A linear layer whose matrix products, forward and backward, take and give BF16 numbers held in FP32."""

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., in] -> float32 [..., out]."""
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = rounded(bias)
        return rounded(functional.linear(rounded(input), rounded(self.weight), bias))


def rounded(x: Tensor) -> Tensor:
    """Round x to BF16 and return it in FP32; autograd rounds the gradient likewise."""
    return x.bfloat16().float()
