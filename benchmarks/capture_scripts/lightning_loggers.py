"""Lightning with two loggers at once: `self.log` writes a CSV file and TensorBoard's events."""

from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        self.log("scale", 2.5, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log_dict(
            {
                "val_loss": nn.functional.cross_entropy(logits, y),
                "val_acc": (logits.argmax(1) == y).float().mean(),
            }
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(6)
x = torch.randn(128, 8)
data = TensorDataset(x, x[:, :4].argmax(1))
trainer = lightning.Trainer(
    max_epochs=3,
    log_every_n_steps=2,
    logger=[CSVLogger("logs", name="csv"), TensorBoardLogger("logs", name="tb")],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, 16, shuffle=True), DataLoader(data, 64))
