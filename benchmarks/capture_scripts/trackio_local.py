"""A loop that logs to Trackio's local database."""

import torch
import trackio
from torch import nn

torch.manual_seed(5)
trackio.init(project="local", config={"width": 8, "lr": 0.1})
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for _ in range(5):
        x = torch.randn(16, 8)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trackio.log({"epoch": epoch, "train_loss": loss.item(), "norms": {"weight": model.weight.norm().item()}})
    if epoch % 2:
        trackio.log({"val_loss": loss.item() / 2, "note": "half"}, step=10 * epoch)
trackio.finish()
