"""What frameworks give to their loggers is stored by the real server: equal, once, at its own step."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from helpers.live_servers import Server
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8scope.integrations.accelerate
import fp8scope.integrations.transformers
from fp8scope.integrations.fabric import Fp8scopeLogger as FabricLogger
from fp8scope.integrations.lightning import Fp8scopeCallback, Fp8scopeLogger
from fp8scope.process.open_runs import live_runs
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

pytestmark = pytest.mark.django_db(transaction=True)
Points = Sequence[tuple[int, float]]


@pytest.fixture(autouse=True)
def sends_to_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    monkeypatch.chdir(tmp_path)
    yield
    for run in list(live_runs):
        run.finish(0)
    # Accelerate keeps the configuration of the first Accelerator in a process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def finished() -> Run:
    """The run of this test, after it has ended without an error."""
    (run,) = live_runs
    report = run.finish()
    assert report.complete and report.errors == 0
    return Run.objects.get()


def stored(run: Run, name: str) -> list[tuple[int, float]]:
    curve = queries.scalar(UUID(str(run.pk)), name)
    return list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


class Squares(lightning.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        output: Tensor = self.layer(batch[0])
        return output.square().mean()

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("double", 2 * loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Sequence[Tensor], index: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(16, 4)), 4)


def in_csv() -> Mapping[str, Points]:
    """The values in the file of Lightning's own logger, with their steps."""
    (path,) = Path("csv").rglob("metrics.csv")
    values: dict[str, list[tuple[int, float]]] = {}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    values.setdefault(name, []).append((int(row["step"]), float(text)))
    return values


@pytest.mark.parametrize("has_callback", [False, True])
def test_it_works(has_callback: bool) -> None:
    """A Trainer of Lightning with our logger beside its own, and with the callback too."""
    callbacks = [Fp8scopeCallback(group="a group")] if has_callback else []
    trainer = lightning.Trainer(
        max_epochs=2,
        log_every_n_steps=2,
        logger=[Fp8scopeLogger(name="logged"), CSVLogger("csv")],
        callbacks=callbacks,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Squares()
    trainer.fit(module, batches(), batches())
    trainer.test(module, batches(), verbose=False)
    run = finished()
    theirs = in_csv()
    assert set(theirs) == {"train_loss_step", "train_loss_epoch", "double", "val_loss", "test_loss"}
    for name, points in theirs.items():
        ours = stored(run, name)
        if has_callback:
            # The run's steps count from 1, and what is logged after the last one belongs to that.
            points = [(min(step + 1, 8), value) for step, value in points]
            steps = range(1, 9) if name in ("train_loss_step", "double") else [step for step, _ in points]
            assert [step for step, _ in ours] == list(steps)
            ours = [point for point in ours if point[0] in dict(points)]
        assert ours == points, name
    assert run.name == "logged" and run.group == ("a group" if has_callback else "")
    assert run.config["width"] == 4
    if not has_callback:
        # A row for each time that Lightning gave values to its loggers.
        (path,) = Path("csv").rglob("metrics.csv")
        assert run.rows_stored == len(path.read_text().splitlines()) - 1
    else:
        assert run.total_steps == 8 and not run.config.get("hyperparameters")
    (checkpoint,) = run.artefacts.values_list("address", flat=True)
    assert "/fp8scope/" in checkpoint and checkpoint.endswith(".ckpt")


def test_fabric() -> None:
    """A loop with Fabric, recorded by the logger alone, at the steps of the loop."""
    fabric = Fabric(accelerator="cpu", loggers=FabricLogger(name="fabric", tags=["loop"]))
    fabric.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.logger.log_hyperparams({"lr": 0.1})
    logged: list[tuple[int, float]] = []
    for step in range(0, 50, 10):
        loss = model(torch.ones(2, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log_dict({"loss": loss, "epoch": 1, "text": "no number"}, step=step)
        fabric.log("epoch", 1, step=step)
        logged.append((step, loss.item()))
    run = finished()
    assert stored(run, "loss") == logged and stored(run, "tracker_step/lightning") == [
        (step, float(step)) for step, _ in logged
    ]
    assert run.name == "fabric" and run.tags == ["loop"] and run.config == {"lr": 0.1}


class Counting(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + torch.arange(8)) % 32
        return {"input_ids": ids, "labels": ids}


def test_report_to() -> None:
    """`report_to="fp8scope"`; beside a callback that the script gives, it does nothing."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1}
    quiet: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments("out", report_to="fp8scope", **settings, **quiet)
    callback = fp8scope.integrations.transformers.Fp8scopeCallback(name="given")
    for given in ([], [callback]):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=given)
        trainer.train()
        # A Trainer leaves its run open.
        (run,) = live_runs
        report = run.finish()
        assert report.complete and report.errors == 0
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        stored_run = Run.objects.order_by("created_at").last()
        assert stored_run is not None and (stored_run.name == "given") is bool(given)
        assert stored(stored_run, "loss") == [(e["step"], e["loss"]) for e in history]
        assert stored(stored_run, "trainer/grad_norm") == [(e["step"], e["grad_norm"]) for e in history]
    assert Run.objects.count() == 2


def test_log_with() -> None:
    """`log_with="fp8scope"` of Accelerate, with a run that `attach` has begun."""
    accelerator = Accelerator(cpu=True, log_with="fp8scope")
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.init_trackers("project", config={"lr": 0.1})
    fp8scope.attach(model, optimizer, name="attached")
    logged: list[tuple[int, float]] = []
    for step in range(1, 5):
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train/loss": loss, "half": step / 2}, step=10 * step)
        logged.append((step, loss.item()))
    assert accelerator.get_tracker("fp8scope", unwrap=True) is live_runs[0]
    accelerator.end_training()
    run = finished()
    assert stored(run, "train/loss") == stored(run, "loss") == logged
    assert stored(run, "half") == [(step, step / 2) for step, _ in logged]
    assert stored(run, "tracker_step/accelerate") == [(step, 10.0 * step) for step, _ in logged]
    assert run.config["lr"] == 0.1 and run.config["accelerate"] == {"project": "project"}
