"""A small FP8 model for tests."""

import torch
from torch import nn

import fp8scope


def tiny_model() -> nn.Module:
    """Two FP8 layers: six tensors to observe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    fp8scope.convert(model, fp8scope.DelayedScaling(history_length=4))
    return model


def train_step(model: nn.Module) -> torch.Tensor:
    """Forward and backward; returns the loss, still attached."""
    loss: torch.Tensor = model(torch.randn(8, 32)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss
