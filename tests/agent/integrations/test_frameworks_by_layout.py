"""Loggers for frameworks that the tests do not install, in modules laid out like theirs."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent.helpers import framework_layouts as layouts
from agent.helpers.event_files import tensorboard_says
from agent.helpers.loops import regression, squares, update
from agent.helpers.wire_server import WireServer

import fp8scope
from fp8scope.config import ConfigurationError
from fp8scope.process.open_runs import live_runs

pytestmark = pytest.mark.usefixtures("online")
STEPS = range(1, 7)
Log = Callable[[dict[str, float], int], None]


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    """Integrations import the layout of this test, not that of another."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fp8scope.integrations."):
            del sys.modules[name]


def integration(name: str) -> Any:
    sys.modules.pop(f"fp8scope.integrations.{name}", None)
    return importlib.import_module(f"fp8scope.integrations.{name}")


def train(log: Log, *, attached: bool = False) -> list[tuple[int, float]]:
    """Train a few steps, and log each as the framework would. Returns what was logged as "train/loss"."""
    model, optimizer = regression()
    if attached:
        fp8scope.attach(model, optimizer, name="attached", overhead=None)
    logged = []
    for step in STEPS:
        loss = squares(model, step)
        torch.autograd.backward(loss)
        update(optimizer)
        log({"train/loss": loss.item(), "lr": 0.1}, step)
        logged.append((step, loss.item()))
    return logged


def stored(server: WireServer, name: str) -> list[tuple[int, float]]:
    rows = [(row["step"], row["scalars"].get(name)) for row in server.run.rows]
    return [(step, value) for step, value in rows if value is not None]


def own_steps(server: WireServer, framework: str) -> list[tuple[int, float]]:
    return stored(server, f"tracker_step/{framework}")


def test_it_works(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's metrics processor, with and without loggers of its own."""
    layouts.torchtitan(monkeypatch)
    ours = integration("torchtitan")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    where = {"dump_folder": "out", "pp_schedule": "1F1B", "config_dict": {"training": {"steps": 6}}}
    first, other = SimpleNamespace(metrics_rank=0), SimpleNamespace(metrics_rank=3)
    off = ours.Fp8scopeMetrics.Config(enable_fp8scope=False)
    theirs = type(ours.Fp8scopeMetrics(off, parallel_dims=first, **where).logger)
    assert theirs.__name__ == "BaseLogger"
    config = ours.Fp8scopeMetrics.Config(fp8scope_name="titan", fp8scope_group="g")
    # The loss is on the last stage of a pipeline only.
    assert type(ours.Fp8scopeMetrics(config, parallel_dims=other, **where).logger) is theirs
    processor = ours.Fp8scopeMetrics(config, parallel_dims=first, tag="t", **where)
    logged = train(processor.logger.log)
    processor.logger.close()
    assert stored(server, "t/train/loss") == logged and stored(server, "t/lr") == [(n, 0.1) for n in STEPS]
    assert own_steps(server, "torchtitan") == [(n, n) for n in STEPS]
    registration = server.run.registration
    assert (registration["name"], registration["group"]) == ("titan", "g")
    assert registration["config"] == {"training": {"steps": 6}} and server.run.finish["errors"] == 0


@pytest.mark.parametrize("attached", [False, True])
def test_torchtune(attached: bool, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("omegaconf", reason="torchtune's configurations are OmegaConf's")
    from omegaconf import OmegaConf

    layouts.torchtune(monkeypatch, rank=0)
    logger = integration("torchtune").Fp8scopeLogger(log_dir="unused", name="tuned")
    logger.log_config(OmegaConf.create({"lr": 0.1, "same": "${lr}"}))
    logged = train(lambda values, step: logger.log_dict(values, step=step), attached=attached)
    logger.log("val", torch.tensor(2.0), step=6)
    logger.close()
    # `close` ends the run only if the logger has begun it.
    assert len(live_runs) == attached
    fp8scope.finish()
    assert stored(server, "train/loss") == logged and stored(server, "val") == [(6, 2.0)]
    assert own_steps(server, "torchtune") == [(n, n) for n in STEPS]
    assert server.run.registration["name"] == ("attached" if attached else "tuned")
    assert server.run.registration["config"]["same"] == 0.1
    if attached:
        assert stored(server, "loss") == logged


def test_ranks_that_the_framework_does_not_log_on_begin_no_run(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.torchtune(monkeypatch, rank=1)
    layouts.composer(monkeypatch, rank=1)
    layouts.deepspeed(monkeypatch, rank=1)
    tune, composer = integration("torchtune").Fp8scopeLogger(), integration("composer").Fp8scopeLogger()
    engine = SimpleNamespace(monitor=layouts.Monitors(enabled=True), global_steps=1, config={})
    monitor = integration("deepspeed").record(engine)
    train(lambda values, step: tune.log_dict(values, step=step))
    composer.log_hyperparameters({"a": 1})
    composer.log_metrics({"a": 1.0}, 1)
    monitor.write_events([("a", 1.0, 8)])
    tune.close()
    composer.close(None, None)
    monitor.values.finish()
    assert server.runs == {} and live_runs == [] and len(monitor.events) == 1


def test_composer(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.composer(monkeypatch, rank=0)
    logger = integration("composer").Fp8scopeLogger(tags=["mosaic"])
    logger.log_hyperparameters({"seed": 17})
    logged = train(logger.log_metrics)
    # The same value again in the same batch.
    logger.log_metrics({"lr": 0.1, "time/epoch": 1}, 6)
    logger.close(None, None)
    assert stored(server, "train/loss") == logged and stored(server, "time/epoch") == [(6, 1.0)]
    assert max(server.run.steps) == 6 and server.run.finish["state"] == "finished"
    assert server.run.registration["tags"] == ["mosaic"]
    assert server.run.registration["config"] == {"seed": 17}


@pytest.mark.parametrize("enabled", [False, True])
def test_deepspeed(enabled: bool, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.deepspeed(monkeypatch, rank=0)
    theirs = layouts.Monitors(enabled=enabled)
    engine = SimpleNamespace(monitor=theirs, global_steps=0, config={"train_batch_size": 8})
    monitor = integration("deepspeed").record(engine, name="speed")
    assert engine.monitor is monitor and monitor.enabled and monitor.csv_monitor == "theirs"

    def log(values: Mapping[str, float], step: int) -> None:
        engine.global_steps = step
        for name, value in values.items():
            engine.monitor.write_events([(f"Train/{name}", value, 8 * step)])

    logged = train(log)
    monitor.values.finish()
    assert stored(server, "Train/train/loss") == logged
    assert set(stored(server, "deepspeed/samples")) == {(n, 8.0 * n) for n in STEPS}
    assert set(own_steps(server, "deepspeed")) == {(n, n) for n in STEPS}
    assert len(theirs.events) == (12 if enabled else 0)
    assert server.run.registration["config"] == {"deepspeed": {"train_batch_size": 8}}


@pytest.mark.parametrize("has_finish", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
def test_verl(has_finish: bool, is_late: bool, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported before verl's module, as by its entry point, or after."""
    tracking = layouts.verl(monkeypatch, has_finish=has_finish)
    integration("verl")
    if is_late:
        integration("verl")
    assert tracking.supported_backend == ["console", "file", "fp8scope"]
    assert "fp8scope" not in tracking("p", "without", "console").logger
    logger = tracking("gsm8k", "ppo", ["console", "fp8scope"], {"trainer": {"epochs": 1}})
    logged = train(lambda values, step: logger.log(values, step))
    if has_finish:
        logger.finish()
    else:
        logger.__del__()
    assert stored(server, "train/loss") == logged and own_steps(server, "verl") == [(n, n) for n in STEPS]
    registration = server.run.registration
    assert registration["name"] == "ppo" and server.run.finish["errors"] == 0
    assert registration["config"] == {"trainer": {"epochs": 1}, "verl": {"project": "gsm8k"}}


def test_ray(server: WireServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layouts.ray(monkeypatch)
    callback = integration("ray").Fp8scopeCallback(name="ray", all_workers=True)
    assert callback.values.arguments["directory"] == str(tmp_path / ".fp8scope")
    saved = SimpleNamespace(checkpoint=SimpleNamespace(path="/store/checkpoint"))

    def log(values: dict[str, float], step: int) -> None:
        reports = [{**values, "step": 10 * step}, {"train/loss": 0.0}]
        callback.after_report(saved if step == 6 else SimpleNamespace(checkpoint=None), reports)

    logged = train(log)
    callback.after_worker_group_poll_status(SimpleNamespace(errors={1: ValueError("worker 1")}))
    asyncio.run(callback.before_controller_shutdown())
    assert stored(server, "train/loss") == [(10 * step, value) for step, value in logged]
    assert stored(server, "worker1/train/loss") == [(10 * n, 0.0) for n in STEPS]
    assert server.run.finish["state"] == "failed" and "worker 1" in server.run.finish["error"]


def test_megatron(server: WireServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its TensorBoard writer has the same values, at the same iterations."""
    variables = layouts.megatron(monkeypatch, tmp_path)
    integration("megatron").record(name="megatron")
    args = SimpleNamespace(tensorboard_dir="tb", rank=0, world_size=2, lr=0.1)
    variables._set_tensorboard_writer(args)
    assert variables._GLOBAL_TENSORBOARD_WRITER is None
    args.rank = 1
    variables._set_tensorboard_writer(args)
    writer: Any = vars(variables)["_GLOBAL_TENSORBOARD_WRITER"]

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
            writer.add_scalar(f"{name} vs samples", value, 32 * step)

    logged = train(log)
    writer.add_text("notes", "text", 1)
    writer.flush()
    fp8scope.finish()
    assert stored(server, "train/loss") == logged and stored(server, "lr") == [(n, 0.1) for n in STEPS]
    assert set(stored(server, "megatron/samples")) == {(n, 32.0 * n) for n in STEPS}
    assert not {name for row in server.run.rows for name in row["scalars"] if "vs" in name}
    assert server.run.registration["config"]["lr"] == 0.1 and server.run.finish["errors"] == 0
    theirs = tensorboard_says(tmp_path / "tb")
    assert dict(theirs["train/loss"]) == pytest.approx(dict(logged)) and len(theirs["lr vs samples"]) == 6


def test_megatron_bridge(server: WireServer) -> None:
    """Its state makes a new writer at each use."""
    ours = integration("megatron")
    state = SimpleNamespace(
        tensorboard_logger=None, _tensorboard_logger=None, cfg=SimpleNamespace(to_dict=dict)
    )
    callback = ours.Fp8scopeCallback(name="bridge")
    for _ in range(2):
        callback.on_train_start(SimpleNamespace(state=state))
    writer = state._tensorboard_logger
    assert writer is callback.writer

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    logged = train(log)
    # Without a writer of its own, what is no scalar goes nowhere.
    assert writer.add_text("notes", "text", 1) is None
    callback.on_train_end(SimpleNamespace(state=state))
    fp8scope.finish()
    assert stored(server, "train/loss") == logged and server.run.registration["name"] == "bridge"


def test_an_unknown_argument_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.composer(monkeypatch, rank=0)
    with pytest.raises(ConfigurationError, match="composer: fp8scope.init has no argument projekt; it"):
        integration("composer").Fp8scopeLogger(projekt="x")
    with pytest.raises(ConfigurationError, match="mode must be one of"):
        integration("composer").Fp8scopeLogger(mode="on").log_metrics({"a": 1.0}, 1)
