"""A tenth of the device's memory and little of its peak are used. `--mended`: most of the memory.

On the emulated accelerator, whose name, and with it its peak, and memory are set here.
"""

import sys

import torch
from torch import nn

MENDED = "--mended" in sys.argv
DEVICE = "emulated"


class Properties:
    """What the emulated device says of itself."""

    total_memory = 1000


torch.emulated.get_device_properties = lambda device=None: Properties  # type: ignore[attr-defined]
torch.emulated.get_device_name = lambda device=None: "NVIDIA H100"  # type: ignore[attr-defined]
torch.emulated.memory_stats = lambda device=None: {  # type: ignore[attr-defined]
    "allocated_bytes.all.peak": 800 if MENDED else 90,
    "reserved_bytes.all.peak": 850 if MENDED else 100,
}
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(DEVICE, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
x = torch.randn(256, 64, dtype=torch.bfloat16).to(DEVICE)
for _ in range(40):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
