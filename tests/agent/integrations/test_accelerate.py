"""Hugging Face Accelerate: `attach` over prepared objects, and the tracker with and without it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from agent.helpers.loops import regression
from agent.helpers.wire_server import WireServer
from torch.utils.data import DataLoader, TensorDataset

import fp8scope
from fp8scope.integrations.accelerate import Fp8scopeTracker


@pytest.fixture(autouse=True)
def online(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    monkeypatch.setenv("FP8SCOPE_INTERVAL", "0.05")
    yield
    # Accelerate keeps what the first Accelerator of a process was told.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def train(accelerator: Accelerator, tracker: Fp8scopeTracker, batches: int) -> list[float]:
    model, optimizer = regression()
    fp8scope.convert(model, fp8scope.DelayedScaling())
    data = DataLoader(TensorDataset(torch.randn(8 * batches, 32)), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    tracker.run = fp8scope.attach(model, optimizer, name="prepared")
    accelerator.init_trackers("unused", config={"batch": 8})
    losses = []
    for (x,) in data:
        with accelerator.accumulate(model):
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if accelerator.sync_gradients:
                accelerator.log({"passes": len(losses), "text": "no number"}, step=77)
    accelerator.end_training()
    return losses


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_it_works(precision: str, server: WireServer, tmp_path: Path) -> None:
    tracker = Fp8scopeTracker()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, log_with=tracker, mixed_precision=precision
    )
    # The last step has one pass, and was divided by two all the same.
    losses = train(accelerator, tracker, batches=7)
    stored = server.run
    assert stored.steps == [1, 2, 3, 4] and stored.finish["state"] == "finished"
    means = [sum(losses[i : i + 2]) / len(losses[i : i + 2]) for i in (0, 2, 4, 6)]
    assert stored.scalars("loss") == pytest.approx(means)
    assert stored.scalars("passes") == [2, 4, 6, 7]
    assert stored.registration["config"] == {"batch": 8} and stored.registration["precision"] == "fp8"
    assert accelerator.get_tracker("fp8scope", unwrap=True) is tracker.run


def test_records_a_loop_that_only_logs(server: WireServer) -> None:
    accelerator = Accelerator(cpu=True, log_with=Fp8scopeTracker(name="only scalars", tags=["plain"]))
    accelerator.init_trackers("unused", config={"lr": 0.1})
    for step in (10, 20):
        accelerator.log({"loss": 1.0 / step}, step=step)
        accelerator.log({"accuracy": torch.tensor(0.5)}, step=step)
    accelerator.log({"loss": 0.01})
    accelerator.end_training()
    stored = server.run
    assert stored.registration["name"] == "only scalars" and stored.registration["config"] == {"lr": 0.1}
    assert stored.steps == [10, 20, 21]
    assert stored.scalars("loss") == [0.1, 0.05, 0.01] and stored.scalars("accuracy") == [0.5, 0.5, None]
