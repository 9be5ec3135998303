"""Lightning with `mlflow.pytorch.autolog()`: MLflow's callback logs what the module logs."""

from typing import Any

import lightning
import mlflow
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(4)
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.pytorch.autolog(log_models=False, log_every_n_step=1)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", (self.layer(x) - y).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
with mlflow.start_run():
    trainer.fit(Regression(), DataLoader(data, 16), DataLoader(data, 64))
