"""The demo's GPT with experts in every second block, for recipes.py: a small mixture of experts.

The experts are plain `nn.Linear` layers, which `fp8scope_kernels.convert` finds one by one. Each token goes
to TOP of EXPERTS. The router is balanced without a loss of its own (Wang et al. 2024, arXiv 2408.15664): a
bias that only the choice sees falls for the experts that get more than their share, and rises for the others.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.demo.model import ByteGpt, Shape

EXPERTS, TOP = 4, 2
BALANCE_RATE = 1e-3
ALIGNMENT = 64
"""An expert's tokens are padded with zeros to a multiple of this: torch prepares products for each size."""


class Expert(nn.Module):
    """Two linear layers around a GELU, twice as wide inside. TOP of them cost as much as the dense ones."""

    def __init__(self, width: int, writers: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.normal_(self.up.weight, std=width**-0.5)
        nn.init.normal_(self.down.weight, std=(width * writers) ** -0.5)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] -> the same."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Experts(nn.Module):
    """The weighted sum of the TOP experts that the router chooses for each token."""

    bias: Tensor

    def __init__(self, width: int, writers: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(width, writers) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        tokens = x.flatten(0, 1)
        affinity = self.router(tokens).float().sigmoid()
        chosen = (affinity.detach() + self.bias).topk(TOP, dim=-1).indices
        gates = affinity.gather(1, chosen)
        gates = gates / gates.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows, choice = (chosen == number).nonzero(as_tuple=True)
            own = functional.pad(tokens[rows], (0, 0, 0, -len(rows) % ALIGNMENT))
            output = expert(own)[: len(rows)].float() * gates[rows, choice, None]
            mixed = mixed.index_add(0, rows, output)
        if self.training:
            load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
            self.bias += BALANCE_RATE * (load.mean() - load).sign()
        return mixed.view_as(x).to(x.dtype)


def experts_gpt(shape: Shape) -> ByteGpt:
    """A ByteGpt of which every second block has experts in the place of its two linear layers."""
    model = ByteGpt(shape)
    for block in list(model.blocks)[1::2]:
        block.mlp = Experts(shape.width, 2 * shape.layers)
    return model
