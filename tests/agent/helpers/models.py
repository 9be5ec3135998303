"""Small models for tests."""

import torch
from torch import nn

import fp8scope
from fp8scope.control.precision import fp8_layers_of, precision_of


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


class Block(nn.Module):
    """Of a residual network: 32 features to 32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


def precisions(model: nn.Module) -> dict[str, str]:
    """Of each FP8 layer by its path, `fp8` or `bf16`."""
    return {path: precision_of(layer) for path, layer in fp8_layers_of(model)}
