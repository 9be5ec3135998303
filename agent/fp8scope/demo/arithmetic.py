"""BF16 arithmetic on a CPU: with its BF16 units, or, where it has none, the same numbers from its FP32 units.

A BF16 matrix product multiplies BF16 numbers, adds up in FP32 and rounds the sum to BF16. FP32 units do just
that with operands that were rounded to BF16 before; without the units, that is an order of magnitude faster
than torch's BF16 products.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional


@cache
def has_units() -> bool:
    """Whether this CPU multiplies BF16 matrices in hardware, as far as torch can tell."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(name.endswith("bf16") and value for name, value in capabilities.items())


def describe() -> str:
    """What a run's page shows."""
    return "BF16 units (autocast)" if has_units() else "BF16 operands on FP32 units"


def bf16() -> AbstractContextManager[object]:
    """The context to run a prepared model in."""
    return torch.autocast("cpu", torch.bfloat16) if has_units() else nullcontext()


def prepare(model: nn.Module) -> int:
    """Without BF16 units, make every plain linear layer of the model compute on rounded operands, in place.
    Returns the number of layers changed."""
    if has_units():
        return 0
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    for module in plain:
        module.__class__ = RoundedLinear
    return len(plain)


class RoundedLinear(nn.Linear):
    """A linear layer whose three matrix products take and give BF16 numbers, held in FP32."""

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., in] -> float32 [..., out]."""
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = rounded(bias)
        return rounded(functional.linear(rounded(input), rounded(self.weight), bias))


def rounded(x: Tensor) -> Tensor:
    """x rounded to BF16, in FP32; so is its gradient."""
    return x.bfloat16().float()
