"""The allocator has tried again and holds memory in pieces. `--mended`: it has not.

On the emulated accelerator, whose allocator has figures that are set here.
"""

import sys

import torch
from torch import nn

MENDED = "--mended" in sys.argv
DEVICE = "emulated"

torch.emulated.memory_stats = lambda device=None: {  # type: ignore[attr-defined]
    "allocated_bytes.all.peak": 700,
    "reserved_bytes.all.peak": 950,
    "reserved_bytes.all.current": 950,
    "inactive_split_bytes.all.current": 20 if MENDED else 400,
    "num_alloc_retries": 0 if MENDED else 7,
}
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(DEVICE, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
x = torch.randn(256, 64, dtype=torch.bfloat16).to(DEVICE)
for _ in range(40):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
