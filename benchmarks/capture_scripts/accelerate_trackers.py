"""Accelerate with two trackers of its own: each value goes to TensorBoard and to W&B."""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(8)
accelerator = Accelerator(log_with=["tensorboard", "wandb"], project_dir="logs", cpu=True)
model = nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.init_trackers("both", config={"lr": 1e-2, "epochs": 2})
step = 0
for epoch in range(2):
    for _ in range(10):
        loss = model(torch.randn(4, 8)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"train_loss": loss.item(), "epoch": epoch, "stage": "train"}, step=step)
    accelerator.log({"eval_loss": loss.item() / 3}, step=step)
accelerator.end_training()
