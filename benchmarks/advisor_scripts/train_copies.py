"""A mask is copied to the device in every step. `--mended`: once. On the emulated accelerator."""

import sys

import torch
from torch import nn

MENDED = "--mended" in sys.argv
DEVICE = "emulated"

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(DEVICE, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
mask = torch.ones(256, 64, dtype=torch.bfloat16)
on_device = mask.to(DEVICE)
for _ in range(40):
    x = torch.randn(256, 64, dtype=torch.bfloat16).to(DEVICE)
    masked = x * (on_device if MENDED else mask.to(DEVICE))
    loss = model(masked).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
