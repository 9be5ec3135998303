"""The Lightning callback with a real Trainer, in both of Lightning's packages."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning
import pytest
import torch
from agent.helpers.wire_server import WireServer
from helpers.examples_folder import example
from torch import Tensor

import fp8scope
from fp8scope.integrations.lightning import Fp8scopeCallback, Fp8scopeLogger
from fp8scope.process.open_runs import live_runs

demo = example("lightning_module")


@pytest.fixture(autouse=True)
def online(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    monkeypatch.setenv("FP8SCOPE_INTERVAL", "0.05")
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def trainer(folder: Path, callback: Fp8scopeCallback, **settings: Any) -> lightning.Trainer:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return lightning.Trainer(**(arguments | settings), callbacks=[callback])


class Watched(demo.NextByte):  # type: ignore[name-defined]
    """Keeps the losses, and logs some values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.seen.append(float(loss.detach()))
        self.log("train/perplexity", loss.detach().exp())
        assert isinstance(loss, Tensor)
        return loss

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test_loss", self.loss(batch[0]))


def test_it_works(server: WireServer, tmp_path: Path) -> None:
    callback = Fp8scopeCallback(convert=fp8scope.DelayedScaling(), name="lightning", group="fp8")
    module = Watched()
    training = trainer(tmp_path, callback, val_check_interval=2)
    training.fit(module, demo.loader(64, 0), demo.loader(16, 1))
    trained = list(module.seen)
    training.test(module, demo.loader(16, 1), verbose=False)
    assert callback.run is not None
    report = callback.run.finish()
    stored = server.run
    assert report.complete and report.errors == 0
    assert stored.steps == [1, 2, 3, 4] and stored.scalars("loss") == pytest.approx(trained)
    assert stored.scalars("tokens") == [8.0 * 17 * step for step in range(1, 5)]
    assert stored.scalars("learning_rate") == [1e-2] * 4
    # Lightning runs forward and backward inside the optimizer's step; their times are still separate.
    for name in ("grad_norm", "time_forward", "time_backward", "time_optimizer"):
        assert all(value and value > 0 for value in stored.scalars(name)), name
    perplexities = torch.tensor(trained).exp().tolist()
    assert stored.scalars("train/perplexity") == pytest.approx(perplexities)
    validated = stored.scalars("val_loss")
    assert [value is not None for value in validated] == [False, True, False, True]
    assert stored.scalars("test_loss")[:3] == [None] * 3 and stored.scalars("test_loss")[3] == pytest.approx(
        validated[3]
    )
    registration = stored.registration
    assert registration["name"] == "lightning" and registration["precision"] == "fp8"
    assert registration["total_steps"] == 4
    assert registration["config"]["hyperparameters"] == {"learning_rate": 1e-2}
    formats = {t["name"]: t["format"] for t in next(iter(stored.catalogues.values()))}
    assert formats["body.0.weight"] == "E4M3" and formats["body.2.grad_output"] == "E5M2"


@pytest.mark.parametrize(("given", "precision"), [("bf16-mixed", "bf16"), ("32-true", "fp32")])
def test_the_precision_is_the_trainers(
    given: str, precision: str, server: WireServer, tmp_path: Path
) -> None:
    callback = Fp8scopeCallback(name="plain")
    trainer(tmp_path, callback, precision=given, max_steps=2).fit(Watched(), demo.loader(64, 0))
    assert callback.run is not None and callback.run.finish().errors == 0
    assert server.run.registration["precision"] == precision


def test_gradient_accumulation_is_one_step(server: WireServer, tmp_path: Path) -> None:
    module, callback = Watched(), Fp8scopeCallback()
    trainer(tmp_path, callback, accumulate_grad_batches=3, max_steps=2).fit(module, demo.loader(128, 0))
    assert callback.run is not None and callback.run.finish().errors == 0
    assert server.run.steps == [1, 2]
    means = [sum(module.seen[:3]) / 3, sum(module.seen[3:6]) / 3]
    assert server.run.scalars("loss") == pytest.approx(means)
    assert server.run.scalars("tokens") == [3 * 8 * 17, 6 * 8 * 17]


class Gan(lightning.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Linear(16, 32)
        self.discriminator = torch.nn.Linear(32, 16)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for_generator, for_discriminator = cast(list[Any], self.optimizers())
        fake = self.generator(batch[0].float()[:, :16])
        for_discriminator.zero_grad()
        loss = self.discriminator(fake.detach()).mean()
        self.manual_backward(loss)
        for_discriminator.step()
        for_generator.zero_grad()
        self.manual_backward(-self.discriminator(fake).mean())
        for_generator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


def test_records_manual_optimization(server: WireServer, tmp_path: Path) -> None:
    callback = Fp8scopeCallback()
    # Lightning counts each optimizer's steps.
    trainer(tmp_path, callback, max_steps=6).fit(Gan(), demo.loader(64, 0))
    assert callback.run is not None and callback.run.finish().errors == 0
    assert server.run.steps == [1, 2, 3] and None not in server.run.scalars("loss")


def test_an_exception_fails_the_run(server: WireServer, tmp_path: Path) -> None:
    class Broken(Watched):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == 2:
                raise ZeroDivisionError("as planned")
            return super().training_step(batch, index)

    callback = Fp8scopeCallback()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, callback).fit(Broken(), demo.loader(64, 0))
    assert callback.run is not None
    callback.run.finish()
    assert server.run.steps == [1, 2] and server.run.finish["state"] == "failed"
    assert "as planned" in server.run.finish["error"]


def test_fitting_twice_makes_two_runs(server: WireServer, tmp_path: Path) -> None:
    callback = Fp8scopeCallback()
    for _ in range(2):
        trainer(tmp_path, callback, max_steps=2).fit(Watched(), demo.loader(64, 0))
    assert callback.run is not None
    callback.run.finish()
    assert [run.steps for run in server.runs.values()] == [[1, 2], [1, 2]]


def test_works_with_pytorch_lightning(
    server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that imports `pytorch_lightning` gets a subclass of that package's Callback."""
    import pytorch_lightning

    for name in [name for name in sys.modules if name.split(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fp8scope.integrations.lightning")
    other = importlib.import_module("fp8scope.integrations.lightning")
    assert issubclass(other.Fp8scopeCallback, pytorch_lightning.Callback)
    assert "lightning.pytorch" not in sys.modules

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 16)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            output: Tensor = self.layer(batch[0].float()[:, :16])
            return output.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = other.Fp8scopeCallback(name="the other one")
    pytorch_lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    ).fit(Module(), demo.loader(64, 0))
    assert callback.run.finish().complete
    assert server.run.registration["name"] == "the other one" and server.run.steps == [1, 2, 3]


def points(server: WireServer, name: str) -> list[tuple[int, float]]:
    rows = [(row["step"], row["scalars"].get(name)) for row in server.run.rows]
    return [(step, value) for step, value in rows if value is not None]


def logging(
    folder: Path, logger: Fp8scopeLogger, *callbacks: Fp8scopeCallback, **more: Any
) -> lightning.Trainer:
    training = trainer(folder, callbacks[0] if callbacks else Fp8scopeCallback(), logger=logger, **more)
    if not callbacks:
        ours = [callback for callback in training.callbacks if isinstance(callback, Fp8scopeCallback)]
        training.callbacks.remove(ours[0])
    return training


def test_a_logger_that_has_begun_the_run_before_the_callback(server: WireServer, tmp_path: Path) -> None:
    """`validate` logs before `fit` trains: one run, in which the callback follows the training."""
    logger, callback = Fp8scopeLogger(name="validated first"), Fp8scopeCallback(name="unused")
    training = logging(tmp_path, logger, callback, log_every_n_steps=1)
    module = Watched()
    training.validate(module, demo.loader(16, 1), verbose=False)
    begun = logger.values.run
    training.fit(module, demo.loader(64, 0))
    assert callback.run is begun is not None and begun.finish().errors == 0
    assert [value for _, value in points(server, "loss")] == pytest.approx(module.seen)
    assert server.run.registration["name"] == "validated first"
    assert len(points(server, "val_loss")) == 1 and len(points(server, "train/perplexity")) == 4


def test_the_logger_alone(server: WireServer, tmp_path: Path) -> None:
    """Its run has Lightning's steps, and no tensors; the experiment is the run."""
    logger, module = Fp8scopeLogger(tags=["alone"]), Watched()
    assert logger.save_dir == "." and logger.experiment is not None and live_runs == []
    logging(tmp_path, logger, log_every_n_steps=2).fit(module, demo.loader(64, 0))
    logger.experiment.log_config({"more": 1})
    assert logger.values.run is live_runs[0] and logger.values.run.finish().errors == 0
    perplexities = torch.tensor(module.seen).exp().tolist()
    assert dict(points(server, "train/perplexity")) == pytest.approx({1: perplexities[1], 3: perplexities[3]})
    assert server.run.registration["tags"] == ["alone"] and not any(server.run.catalogues.values())
    assert server.run.registration["config"] == {"learning_rate": 1e-2, "more": 1}


def test_the_loggers_of_other_ranks_record_nothing(
    server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_utilities.core.rank_zero.rank_zero_only.rank", 1)
    logger = Fp8scopeLogger()
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"a": 1.0}, 1)
    logger.finalize("success")
    assert logger.experiment is None and logger.values.run is None and server.runs == {}


def test_an_exception_fails_the_run_of_the_logger(server: WireServer, tmp_path: Path) -> None:
    class Broken(Watched):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == 2:
                raise ZeroDivisionError("as planned")
            return super().training_step(batch, index)

    logger = Fp8scopeLogger()
    with pytest.raises(ZeroDivisionError):
        logging(tmp_path, logger, log_every_n_steps=1).fit(Broken(), demo.loader(64, 0))
    assert logger.values.run is not None
    logger.values.run.finish()
    assert server.run.finish["state"] == "failed" and "as planned" in server.run.finish["error"]


def test_a_value_that_the_callback_has_is_left_out() -> None:
    """Also if the callback got it as a tensor of a device, and where it is not finite."""

    class Beside:
        last: Mapping[str, Any] = {
            "a": torch.tensor(0.1),
            "b": torch.tensor(float("nan")),
            "c": torch.tensor(1.0),
            "d": "text",
        }

    logger = Fp8scopeLogger(mode="disabled")
    logger.beside = Beside()
    nan = float("nan")
    logger.log_metrics({"a": torch.tensor(0.1).item(), "b": nan, "c": 2.0, "d": 1.0, "e": 1.0}, 0)
    assert logger.own_names == {"c", "d", "e"}
