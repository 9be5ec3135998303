"""A small model and how it is trained, for the tests of optimizers."""

from typing import Any

import torch
from torch import nn

from fp8scope_kernels.optimizer import Fp8AdamW


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x.to(dtype)).float() - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one(values: list[Any], grad: list[Any], **options: Any) -> tuple[nn.Parameter, Fp8AdamW]:
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = torch.tensor(grad)
    return parameter, Fp8AdamW([parameter], **options)
