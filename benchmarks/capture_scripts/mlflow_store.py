"""A regression that logs to MLflow's SQLite store, by single metrics, batches of them, and without a step."""

import mlflow
import torch
from torch import nn

torch.manual_seed(3)
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("regression")
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
with mlflow.start_run():
    mlflow.log_params({"lr": 0.05, "optimizer": "Adam", "bias": True})
    for step in range(30):
        x = torch.randn(32, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mlflow.log_metric("train_loss", loss.item(), step=step)
        if step % 10 == 9:
            mlflow.log_metrics({"val_loss": loss.item() * 1.1, "val mae": 0.3 / step}, step=step + 1)
    mlflow.log_metric("final", loss.item())
