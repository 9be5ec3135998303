"""Hugging Face's Trainer, really run: a tiny Llama with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from helpers.examples_folder import example
from transformers import Trainer, TrainingArguments

import fp8scope
from fp8scope.integrations.transformers import Fp8scopeCallback

tiny = example("transformers_trainer")


pytestmark = pytest.mark.usefixtures("online")


class Recording(Trainer):
    """Keeps the loss of every micro-batch, as the Trainer itself reports it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.seen.append(float(loss))
        return loss


def trainer(folder: Path, callback: Fp8scopeCallback, **settings: Any) -> Recording:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return Recording(
        model=tiny.tiny_llama(),
        args=TrainingArguments(str(folder), **(arguments | settings)),
        train_dataset=tiny.Counting(64, seed=0),
        eval_dataset=tiny.Counting(4, seed=1),
        callbacks=[callback],
    )


def test_it_works(server: WireServer, tmp_path: Path) -> None:
    callback = Fp8scopeCallback(convert=fp8scope.CurrentScaling(), group="fp8", tags=["llama"])
    training = trainer(tmp_path, callback, eval_strategy="steps", eval_steps=2, run_name="a tiny llama")
    training.train()
    assert callback.run is not None
    report = callback.run.finish()
    stored = server.run
    assert report.complete and report.errors == 0
    assert stored.steps == [1, 2, 3, 4] and stored.scalars("loss") == pytest.approx(training.seen)
    assert stored.scalars("tokens") == [64.0 * step for step in range(1, 5)]
    assert stored.scalars("learning_rate") == [1e-2] * 4
    assert all(norm and norm > 0 for norm in stored.scalars("grad_norm"))
    evaluated = [entry for entry in training.state.log_history if "eval_loss" in entry]
    assert stored.scalars("eval/loss") == [None, evaluated[0]["eval_loss"], None, evaluated[1]["eval_loss"]]
    logged = [entry for entry in training.state.log_history if "grad_norm" in entry]
    assert stored.scalars("trainer/grad_norm") == pytest.approx([entry["grad_norm"] for entry in logged])
    registration = stored.registration
    assert registration["name"] == "a tiny llama" and registration["group"] == "fp8"
    assert registration["precision"] == "fp8" and registration["recipe"]["recipe"] == "CurrentScaling"
    assert registration["total_steps"] == 4 and registration["seed"] == 42
    assert registration["config"]["model"]["hidden_size"] == 64
    assert registration["config"]["trainer"]["learning_rate"] == 1e-2
    formats = {t["name"]: t["format"] for t in next(iter(stored.catalogues.values()))}
    assert formats["model.layers.1.mlp.down_proj.weight"] == "E4M3"
    assert "lm_head.weight" not in formats or not formats["lm_head.weight"]


def test_gradient_accumulation_adds_up_the_loss(server: WireServer, tmp_path: Path) -> None:
    """The Trainer divides the loss by all tokens of the step: what it differentiates adds up."""
    callback = Fp8scopeCallback()
    training = trainer(tmp_path, callback, gradient_accumulation_steps=4, max_steps=2)
    training.train()
    assert callback.run is not None and callback.run.finish().errors == 0
    assert server.run.steps == [1, 2]
    assert server.run.scalars("loss") == pytest.approx([sum(training.seen[:4]), sum(training.seen[4:])])
    # Random weights predict one of 256 bytes: about ln 256.
    assert server.run.scalars("loss")[0] == pytest.approx(5.55, rel=0.1)
    assert server.run.scalars("tokens") == [256, 512]


def test_continues_from_a_checkpoint(server: WireServer, tmp_path: Path) -> None:
    first = trainer(
        tmp_path, Fp8scopeCallback(name="first"), max_steps=2, save_strategy="steps", save_steps=2
    )
    first.train()
    server_runs = dict(server.runs)
    callback = Fp8scopeCallback(name="second")
    second = trainer(tmp_path, callback, max_steps=4)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert callback.run is not None
    callback.run.finish()
    assert server.runs[callback.run.id].steps == [3, 4] and callback.run.id not in server_runs


def test_training_twice_makes_two_runs_unless_one_was_given(server: WireServer, tmp_path: Path) -> None:
    callback = Fp8scopeCallback(name="each its own")
    training = trainer(tmp_path, callback, max_steps=2)
    training.train()
    first = callback.run
    training.train()
    assert first is not None and callback.run is not None and callback.run is not first
    callback.run.finish()
    assert [server.runs[run.id].steps for run in (first, callback.run)] == [[1, 2], [1, 2]]

    given = fp8scope.init(name="given")
    training = trainer(tmp_path, Fp8scopeCallback(given), max_steps=2)
    training.train()
    training.train()
    given.finish()
    assert server.runs[given.id].steps == [1, 2, 3, 4]
    assert server.runs[given.id].registration["config"]["trainer"]["max_steps"] == 2


def test_an_exception_fails_the_run(server: WireServer, tmp_path: Path) -> None:
    class Broken(Recording):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if len(self.seen) == 2:
                raise ZeroDivisionError("as planned")
            return super().training_step(*args, **kwargs)

    callback = Fp8scopeCallback()
    training = trainer(tmp_path, callback)
    training.__class__ = Broken
    with pytest.raises(ZeroDivisionError):
        training.train()
    assert callback.run is not None and callback.run.finish().errors == 0
    assert server.run.steps == [1, 2]
