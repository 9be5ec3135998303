"""A training with hashes of its batches, alone or data-parallel. Ranks import it, so it needs no Django."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fp8scope

STEPS, BATCH, OTHER_STEP = 30, 8, 12


def train_ranks(rank: int, size: int, options: dict[str, Any]) -> list[str]:
    """Two runs, the second with another sample in one step. Returns their ids."""
    # As torchrun sets them.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return [train(rank, size, options, other_data) for other_data in (False, True)]


def train(rank: int, size: int, options: dict[str, Any], other_data: bool = False) -> str:
    """Each rank trains on its share of every batch. Returns the id of the run."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model = DistributedDataParallel(layers) if distributed.is_initialized() else layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = fp8scope.attach(model, optimizer, data_hash=True, **options)
    for number in range(STEPS):
        samples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(number))
        if other_data and number == OTHER_STEP:
            # Only the share of the last rank differs.
            samples[-1] += 1.0
        share = samples.chunk(size)[rank]
        loss = (model(share) - share).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = run.finish()
    assert report.complete and report.errors == 0, report
    return run.id
