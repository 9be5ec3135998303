"""Trainers that hand values on to trackers, with the trackers they really write to."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agent.helpers.launching import Launch, here
from agent.helpers.wire_server import WireServer

from fp8scope.capture import active

__all__ = ["here"]

ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(log_with="tensorboard", project_dir="logs", cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.init_trackers("p", config={"lr": 0.1})
for step in range(4):
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"train_loss": loss.item(), "constant": 1.0, "array": [1.0]}, step=step)
accelerator.end_training()
"""

LIGHTNING = """
import lightning, torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

class Own(CSVLogger):
    def log_metrics(self, metrics, step=None):
        super().log_metrics({f"own_{name}": value for name, value in metrics.items()}, step)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, index):
        self.log("val_loss", self.layer(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(16, 4)), 4)
loggers = [{loggers}]
trainer = lightning.Trainer(max_epochs=2, log_every_n_steps=1, logger=loggers, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
trainer.fit(Module(), data, data)
"""


def values(server: WireServer, name: str) -> Counter[tuple[int, float]]:
    return Counter(
        (row["step"], row["scalars"][name]) for row in server.run.rows if row["scalars"].get(name) is not None
    )


def test_it_works(server: WireServer, here: Launch, tmp_path: Path) -> None:
    """accelerator.log: two routes, and each value once."""
    (tmp_path / "loop.py").write_text(ACCELERATE)
    assert here(tmp_path / "loop.py") == 0
    stored = server.run
    assert stored.finish["errors"] == 0 and stored.steps == [1, 2, 3, 4]
    assert stored.scalars("train_loss") == stored.scalars("loss")
    assert stored.scalars("constant") == [1.0] * 4
    assert stored.scalars("tracker_step/tensorboard") == [0.0, 1.0, 2.0, 3.0]
    assert stored.registration["config"]["lr"] == 0.1
    assert stored.registration["environment"]["capture"]["values"]["tensorboard"] == 8


@pytest.mark.parametrize(
    "loggers", ['CSVLogger("logs", name="csv")', 'Own("logs", name="csv"), TensorBoardLogger("tb")']
)
def test_lightning_with_any_logger(loggers: str, server: WireServer, here: Launch, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(LIGHTNING.replace("{loggers}", loggers))
    assert here(tmp_path / "fit.py") == 0
    stored = server.run
    assert stored.finish["errors"] == 0 and sorted(set(stored.steps)) == list(range(1, 9))
    (path,) = (tmp_path / "logs").rglob("metrics.csv")
    rows: list[dict[str, Any]] = list(csv.DictReader(path.open()))
    own = "own_" if "Own" in loggers else ""
    for name in ("train_loss", "val_loss"):
        written = Counter(
            (int(row["step"]) + 1, float(row[f"{own}{name}"])) for row in rows if row.get(f"{own}{name}")
        )
        assert values(server, name) == pytest.approx(written)
    assert len(values(server, "val_loss")) == 2


HF = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        ids = (index + torch.arange(8)) % 32
        return {"input_ids": ids, "labels": ids}

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=4, logging_steps=2, report_to=["tensorboard"],
    use_cpu=True, disable_tqdm=True, save_strategy="no", eval_strategy="steps", eval_steps=4,
)
model, data = LlamaForCausalLM(config), Counting()
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
"""


def test_a_trainer_that_reports_to_tensorboard(server: WireServer, here: Launch, tmp_path: Path) -> None:
    """Our own callback gets the same values, and leaves out what the tracker got."""
    (tmp_path / "hf.py").write_text(HF)
    assert here(tmp_path / "hf.py") == 0
    stored = server.run
    assert stored.finish["errors"] == 0 and sorted(set(stored.steps)) == [1, 2, 3, 4]
    assert [step for step, _ in values(server, "train/loss")] == [2, 4]
    assert [step for step, _ in values(server, "train/grad_norm")] == [2, 4]
    assert sum(values(server, "eval/loss").values()) == 1
    names = {name for row in stored.rows for name in row["scalars"]}
    assert not {name for name in names if name.startswith("trainer/")}
    assert active.current() is None
