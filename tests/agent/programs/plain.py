"""A training script that knows nothing of fp8scope."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(96, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 96)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
called = torch.compile(model, backend="eager", fullgraph=True) if options.compile else model
for _ in range(options.steps):
    ids = torch.randint(0, 96, (4, 9))
    loss = nn.functional.cross_entropy(called(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.9g}")
