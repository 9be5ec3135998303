"""The second rank gets an eighth of the first one's samples. `--mended`: as many."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 4096 if "--mended" in sys.argv or os.environ["RANK"] == "0" else 512

torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(SAMPLES, 256)
for _ in range(25):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
