"""The compiled model reads a value in its forward pass. `--mended`: it does not."""

import sys

import torch
from torch import Tensor, nn

MENDED = "--mended" in sys.argv


class Model(nn.Module):
    """Three layers, with a check between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if not MENDED and x.abs().max().item() > 1e6:
                raise ValueError("activations are too large")
        return x


model = Model()
model.compile(backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(256, 512)
for _ in range(40):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
