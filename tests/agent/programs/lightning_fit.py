"""A Lightning script as people write it, and nothing of fp8scope."""

import argparse
import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class NextByte(lightning.LightningModule):
    """Predicts each next byte; its parts are called, and it is not."""

    def __init__(self, width: int = 48, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 256)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        logits = self.head(self.body(self.embed(batch[0][:, :-1])))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("train/loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        print(f"batch {index}: loss {outputs['loss'].item():.9g}")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

torch.manual_seed(0)
text = (torch.randint(0, 256, (256, 1)) + torch.arange(17)) % 256
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_steps=options.steps,
        val_check_interval=max(1, options.steps // 2),
        check_val_every_n_epoch=None,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(NextByte(), DataLoader(TensorDataset(text), 8), DataLoader(TensorDataset(text[:16]), 8))
