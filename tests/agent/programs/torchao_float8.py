"""A model that torchao has converted to its own FP8 layers, and nothing of fp8scope."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 256)
)
# On a CPU the products of FP8 operands are emulated; the casts are the same.
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(options.steps):
    text = (torch.randint(0, 256, (8, 1)) + torch.arange(17)) % 256
    loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.9g}")
