"""A small FP8 model, data that differs between ranks, and its scales: for tests over process groups."""

import torch
from torch import Tensor, nn

from fp8scope_kernels import Recipe, convert, fp8_layers
from fp8scope_kernels.recipes import ROLES

STEPS = 4


def make_model(recipe: Recipe | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    if recipe is not None:
        convert(model, recipe)
    return model


def batch(step: int, rank: int, rows: int = 16) -> Tensor:
    """Rank 1's data is larger, so that amaxes differ."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 32, generator=generator) * (1 + 2 * rank)


def scales(model: nn.Module) -> dict[str, float]:
    return {
        f"{path}.{role}": layer.state_of(role).scale.item()
        for path, layer in fp8_layers(model)
        for role in ROLES
    }


def train(model: nn.Module, ranks: list[int], optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss of each step on these ranks' data."""
    losses = []
    for step in range(STEPS):
        x = torch.cat([batch(step, rank) for rank in ranks])
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
