"""A checkpoint in every second step. `--mended`: one at the end."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

MENDED = "--mended" in sys.argv

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(64, 1024)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.pt"
    for step in range(40):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not MENDED and step % 2 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    torch.save(model.state_dict(), path)
