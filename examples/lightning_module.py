"""A Lightning module, recorded by a callback.

fp8scope login http://localhost:8265
python examples/lightning_module.py --fp8
"""

import argparse
import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fp8scope import DelayedScaling
from fp8scope.integrations.lightning import Fp8scopeCallback

VOCABULARY, LENGTH, WIDTH = 256, 17, 48


class NextByte(lightning.LightningModule):
    """Predicts each next byte from the one before."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, text: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(text[:, :-1])))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def loader(items: int, seed: int) -> "DataLoader[tuple[Tensor, ...]]":
    """Sequences that count up by one from a random start."""
    starts = torch.randint(0, VOCABULARY, (items, 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset((starts + torch.arange(LENGTH)) % VOCABULARY), batch_size=8)


def main() -> None:
    """Train and validate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()

    lightning.seed_everything(0)
    callback = Fp8scopeCallback(
        name="lightning" + (" fp8" if options.fp8 else ""),
        convert=DelayedScaling() if options.fp8 else None,  # before configure_optimizers
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=options.steps,
            val_check_interval=max(1, options.steps // 2),
            check_val_every_n_epoch=None,
            accelerator="auto",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[callback],
        )
        trainer.fit(NextByte(), loader(512, seed=0), loader(32, seed=1))
    if callback.run is not None:
        report = callback.run.finish()
        print(f"{report.rows_sent} steps have arrived: {callback.run.url}" if report.complete else report)


if __name__ == "__main__":
    main()
