"""Half of the products run in FP32: a block leaves autocast. `--mended`: none does."""

import sys

import torch
from torch import Tensor, nn

MENDED = "--mended" in sys.argv


class Block(nn.Module):
    """Two layers; in FP32 unless mended."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=MENDED):
            y: Tensor = self.layers(x if MENDED else x.float())
        return x + y


model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), Block(), nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(256, 512)
for _ in range(40):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
