"""The real trackers, called as scripts call them: what they store is recorded, as they store it."""

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from agent.helpers.launching import Launch, here
from agent.helpers.loops import regression, squares, update
from agent.helpers.wire_server import WireServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import fp8scope
from fp8scope.capture import active
from fp8scope.capture.patching import version_of
from fp8scope.run import Run

__all__ = ["here"]
pytestmark = pytest.mark.usefixtures("online")
WRITERS = ("torch.utils.tensorboard", "tensorboardX")


def attached(**how: Any) -> tuple[Run, Callable[[], torch.Tensor]]:
    """An attached run, and a function that trains a step and returns its loss."""
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, overhead=None, **how)
    numbers = iter(range(10**6))

    def step() -> torch.Tensor:
        loss = squares(model, next(numbers))
        loss.backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        return loss.detach()

    return run, step


def events(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The steps and values that an event file has of a tag."""
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    if tag in accumulator.Tags()["scalars"]:
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(tag)]


def points(server: WireServer, name: str) -> list[tuple[int, float]]:
    """The steps and values of a scalar in all rows, in the order in which they came."""
    rows = [(row["step"], row["scalars"].get(name)) for row in server.run.rows]
    return [(step, value) for step, value in rows if value is not None]


@pytest.mark.parametrize("module", WRITERS)
def test_it_works(module: str, server: WireServer, tmp_path: Path) -> None:
    run, step = attached()
    writer = importlib.import_module(module).SummaryWriter(str(tmp_path / "events"))
    for number in range(4):
        loss = step()
        writer.add_scalar("train/loss", loss, number)
        writer.add_scalar("acc", scalar_value=number / 4, global_step=number)
        writer.add_scalars("pair", {"a": number, "b": torch.tensor(2.0)}, number)
        writer.add_histogram("weights", torch.ones(3), number)
    writer.add_hparams({"lr": 0.1, "name": "x"}, {"hparam/acc": 0.5})
    writer.close()
    assert run.finish().errors == 0
    stored = server.run
    assert events(tmp_path / "events", "acc") == [(number, number / 4) for number in range(4)]
    losses = [value for _, value in events(tmp_path / "events", "train/loss")]
    assert [value for _, value in points(server, "train/loss")] == losses
    assert losses == pytest.approx([value for _, value in points(server, "loss")])
    assert points(server, "acc") == [(number + 1, number / 4) for number in range(4)]
    assert points(server, "pair/a") == [(number + 1, float(number)) for number in range(4)]
    assert points(server, "hparam/acc") == [(4, 0.5)]
    beside = {
        row["scalars"].get("acc"): row["scalars"].get("tracker_step/tensorboard") for row in stored.rows
    }
    assert [beside[number / 4] for number in range(4)] == [0, 1, 2, 3]
    assert stored.registration["config"] == {"lr": 0.1, "name": "x"}


def test_functions_are_restored_at_the_end(server: WireServer, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    before = SummaryWriter.add_scalar, SummaryWriter.add_scalars, SummaryWriter.add_hparams
    run, step = attached()
    assert SummaryWriter.add_scalar is not before[0]
    run.finish()
    assert (SummaryWriter.add_scalar, SummaryWriter.add_scalars, SummaryWriter.add_hparams) == before
    assert active.current() is None


def test_an_exception_of_the_tracker_is_the_scripts(server: WireServer, tmp_path: Path) -> None:
    """And the value is recorded although the tracker failed."""
    from torch.utils.tensorboard import SummaryWriter

    run, step = attached()
    writer = SummaryWriter(str(tmp_path / "events"))
    step()
    with pytest.raises(TypeError):
        writer.add_scalar("x", 1.0, global_step=object())
    with pytest.raises(TypeError):
        writer.add_scalar()  # type: ignore[call-arg]
    writer.close()
    report = run.finish()
    assert [value for _, value in points(server, "x")] == [1.0]
    # The call without arguments could not be read; the script got the tracker's own exception.
    assert report.errors == 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    module = importlib.import_module("wandb")
    yield module
    if module.run is not None:
        module.finish()
    module.teardown()


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_in_every_mode(
    mode: str, server: WireServer, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    run, step = attached()
    other = wandb.init(project="p", config={"lr": 0.1, "model": {"depth": 2}})
    wandb.define_metric("val/*", step_metric="epoch")
    for number in range(3):
        step()
        wandb.log({"val": {"acc": number / 2}, "image": wandb.Histogram([1.0])})
        wandb.log({"a": number}, commit=False)
        wandb.log({"a": number + 0.5, "b": 1}, commit=False)
    wandb.log({"late": 1.0}, step=100)
    wandb.config.update({"epochs": 3})
    wandb.config.width = 7
    wandb.summary["best"] = 0.9
    other.summary.update({"worst": 0.1})
    wandb.finish()
    assert run.finish().errors == 0
    stored = server.run
    by_step: dict[int, dict[str, float]] = {}
    for row in stored.rows:
        named = {name: row["scalars"].get(name) for name in ("val.acc", "a", "b", "late")}
        by_step.setdefault(row["step"], {}).update({name: v for name, v in named.items() if v is not None})
    assert by_step == {
        1: {"val.acc": 0.0, "a": 0.5, "b": 1.0},
        2: {"val.acc": 0.5, "a": 1.5, "b": 1.0},
        3: {"val.acc": 1.0, "a": 2.5, "b": 1.0, "late": 1.0},
    }
    # wandb counts on with each call that commits; `a` and `b` are committed by the next call.
    scalars = [row["scalars"] for row in stored.rows]
    beside = [named["tracker_step/wandb"] for named in scalars if named.get("b") is not None]
    assert beside == [1.0, 2.0, 3.0]
    assert stored.registration["config"] == {"lr": 0.1, "model": {"depth": 2}, "epochs": 3, "width": 7}
    assert stored.registration["summary"] == {"best": 0.9, "worst": 0.1}
    facts = stored.registration["environment"]["capture"]
    assert facts["left_out"] == {"wandb": {"Histogram": 3}}
    assert facts["step_metrics"] == {"wandb": {"val/*": "epoch"}}


def test_a_wandb_run_that_began_before_attach(
    server: WireServer, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.init(project="p", config={"lr": 0.1})
    log = wandb.log
    run, step = attached()
    step()
    wandb.log({"x": 1.0})
    with pytest.raises(TypeError, match="dictionary"):
        wandb.log(5)
    run.finish()
    assert wandb.log == log
    wandb.log({"x": 2.0})
    assert [value for _, value in points(server, "x")] == [1.0]
    assert server.run.registration["config"] == {"lr": 0.1}


def test_nothing_is_imported_that_the_script_does_not_import(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, torch, fp8scope
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = fp8scope.attach(model, optimizer, mode="offline", directory=sys.argv[1])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.finish()
        names = "wandb tensorboard tensorboardX mlflow trackio swanlab aim accelerate lightning transformers"
        print([name for name in names.split() if name in sys.modules])
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_tracker_of_another_layout_is_one_warning(
    server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "trackio"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text("class Run:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    run, step = attached()
    importlib.import_module("trackio.run")
    step()
    assert run.finish().complete
    assert [r.message for r in caplog.records if "trackio" in r.message] == [
        f"calls of trackio {version_of('trackio')} are not all captured: "
        "Run is not as expected (it has no function log)."
    ]
    for name in ("trackio", "trackio.run"):
        monkeypatch.delitem(sys.modules, name)


UNTRAINED = """
from tensorboardX import SummaryWriter
writer = SummaryWriter("events")
for step in range(0, 100, 10):
    writer.add_scalar("loss", 1.0 / (step + 1), step)
    writer.add_scalar("acc", 0.5, step)
    if step % 50 == 0:
        writer.add_scalar("epoch", step, step // 50)
writer.close()
"""


def test_a_script_without_torchs_training_has_the_trackers_steps(
    server: WireServer, here: Launch, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(UNTRAINED)
    assert here(tmp_path / "loop.py") == 0
    stored = server.run
    assert stored.finish["state"] == "finished" and stored.finish["errors"] == 0
    assert sorted(set(stored.steps)) == list(range(0, 100, 10))
    assert points(server, "loss") == [(step, 1.0 / (step + 1)) for step in range(0, 100, 10)]
    assert points(server, "epoch") == [(0, 0.0), (50, 50.0)]
    assert stored.registration["name"].startswith("loop ")


FEW = """
from tensorboardX import SummaryWriter
writer = SummaryWriter("events")
writer.add_scalar("score", 0.5, 7)
writer.close()
"""


def test_one_value_of_a_script_without_training(server: WireServer, here: Launch, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(FEW)
    assert here(tmp_path / "score.py") == 0
    assert [(row["step"], row["scalars"]["score"]) for row in server.run.rows] == [(7, 0.5)]
    assert active.current() is None


WARM = """
import torch
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("events")
if {early}:
    for episode in range(5):
        writer.add_scalar("return", float(episode), 10 * episode)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if not {early}:
    for episode in range(5):
        writer.add_scalar("return", float(episode), 10 * episode)
for step in range(3):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    writer.add_scalar("step", float(step), 100 + step)
writer.close()
"""


@pytest.mark.parametrize("early", [False, True])
def test_values_before_the_training(early: bool, server: WireServer, here: Launch, tmp_path: Path) -> None:
    """With an optimizer they wait for its first step; without one they begin the run, which it continues."""
    (tmp_path / "warm.py").write_text(WARM.format(early=early))
    assert here(tmp_path / "warm.py") == 0
    returns, trained = points(server, "return"), points(server, "step")
    if early:
        assert returns == [(10 * episode, float(episode)) for episode in range(5)]
        assert trained == [(41, 0.0), (42, 1.0), (43, 2.0)]
    else:
        assert returns == [(0, float(episode)) for episode in range(5)]
        assert trained == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert [step for step, _ in points(server, "loss")] == [step for step, _ in trained]


OWN_RUN = """
import torch, fp8scope
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("events")
writer.add_scalar("before", 1.0, 0)
run = fp8scope.init(name="own")
for step in range(5):
    writer.add_scalar("x", 1.0, step)
    run.log(y=1.0, step=step)
run.finish()
writer.close()
"""


def test_a_script_that_records_a_run_itself_is_left_alone(
    server: WireServer, here: Launch, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_RUN)
    assert here(tmp_path / "own.py") == 0
    assert server.run.registration["name"] == "own" and server.run.scalars("y") == [1.0] * 5
    assert set(server.run.scalars("x")) == {None}


def test_run_takes_the_names_of_trackers(server: WireServer, here: Launch, tmp_path: Path) -> None:
    (tmp_path / "warm.py").write_text(WARM.format(early=False))
    assert here("--capture", "wandb", tmp_path / "warm.py") == 0
    assert server.run.steps == [1, 2, 3] and set(server.run.scalars("return")) == {None}
    assert here("--capture", "nothing", tmp_path / "warm.py") == 2
