"""Two ranks reduce the gradients of each of four micro-batches. `--mended`: once a step."""

import sys

import torch
import torch.distributed as dist
from torch import nn

MICRO_BATCHES = 4
MENDED = "--mended" in sys.argv

torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(192 if MENDED else 8, 1024)


def reduce_gradients() -> None:
    """Average the gradients over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


for _ in range(25):
    optimizer.zero_grad()
    for _ in range(MICRO_BATCHES):
        model(x).square().mean().backward()
        if not MENDED:
            reduce_gradients()
    if MENDED:
        reduce_gradients()
    optimizer.step()
dist.destroy_process_group()
