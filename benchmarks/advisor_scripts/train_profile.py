"""Statistics in plain Python after each backward pass take longer than the step. `--mended`: on tensors."""

import sys

import torch
from torch import nn

MENDED = "--mended" in sys.argv

model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(512, 256)
history = []
for _ in range(40):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if MENDED:
        history.append(max(float(gradient.abs().amax()) for gradient in gradients))
    else:
        history.append(max(abs(value) for gradient in gradients for value in gradient.flatten().tolist()))
    optimizer.step()
