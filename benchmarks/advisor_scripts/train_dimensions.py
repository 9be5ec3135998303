"""BF16 products of 250 x 1001. `--mended`: of 256 x 1008."""

import sys

import torch
from torch import nn

WIDTH, HIDDEN = (256, 1008) if "--mended" in sys.argv else (250, 1001)

model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(256, WIDTH)
for _ in range(40):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
