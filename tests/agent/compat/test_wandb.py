"""`import fp8scope.compat.wandb as wandb` where W&B is not installed."""

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.helpers.launching import Launch, here
from agent.helpers.loops import regression, squares, update
from agent.helpers.wire_server import WireServer

import fp8scope
import fp8scope.compat.wandb as wandb

__all__ = ["here"]
pytestmark = pytest.mark.usefixtures("online")


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    yield
    wandb.finish()


def points(server: WireServer, name: str) -> list[tuple[int, float]]:
    rows = [(row["step"], row["scalars"].get(name)) for row in server.run.rows]
    return [(step, value) for step, value in rows if value is not None]


def test_it_works(server: WireServer) -> None:
    run = wandb.init(project="p", name="compat", config={"lr": 0.1}, tags=["a"], group="g")
    assert wandb.run is run and run.name == "compat" and run.project == "p" and not run.disabled
    wandb.define_metric("val/*", step_metric="epoch")
    wandb.watch(object())
    for number in range(4):
        wandb.log({"loss": 1.0 / (number + 1), "val": {"acc": number}}, commit=False)
        wandb.log({"image": wandb.Image([1]), "nan": math.nan})
    assert run.step == 4
    table = wandb.Table(columns=["a"])
    table.add_data(1)
    wandb.log({"loss": 0.1, "table": table}, step=10)
    wandb.config.epochs = 3
    wandb.config.update({"width": 7}, allow_val_change=True)
    wandb.config.setdefaults({"width": 9, "depth": 2})
    wandb.summary["best"] = 0.5
    assert wandb.config.lr == 0.1 and wandb.config["width"] == 7 and wandb.summary["loss"] == 0.1
    wandb.finish()
    stored = server.run
    assert wandb.run is None and stored.finish["state"] == "finished" and stored.finish["errors"] == 0
    assert points(server, "loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3), (3, 0.25), (10, 0.1)]
    assert points(server, "val.acc") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    registration = stored.registration
    assert registration["name"] == "compat" and registration["tags"] == ["a"] and registration["group"] == "g"
    assert registration["config"] == {
        "lr": 0.1, "epochs": 3, "width": 7, "depth": 2, "wandb": {"project": "p"}
    }  # fmt: skip
    assert registration["summary"] == {"best": 0.5}
    facts = registration["environment"]["capture"]
    assert facts["left_out"] == {"wandb": {"LoggedImage": 4}}
    assert facts["step_metrics"] == {"wandb": {"val/*": "epoch"}}


def test_it_records_in_the_attached_run(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, name="attached", overhead=None)
    ours = wandb.init(project="p", name="other")
    assert ours.id == run.id and ours.name == "attached"
    for number in range(3):
        squares(model, number).backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        wandb.log({"acc": float(number)})
    wandb.finish()
    assert not run.finished
    run.finish()
    assert points(server, "acc") == [(1, 0.0), (2, 1.0), (3, 2.0)]


SCRIPT = """
import torch
import fp8scope.compat.wandb as wandb
wandb.init(config={"lr": 0.1})
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    wandb.log({"acc": float(step)})
wandb.finish()
"""


def test_it_records_in_the_run_of_fp8scope_run(server: WireServer, here: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert here(tmp_path / "script.py") == 0
    assert points(server, "acc") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert server.run.registration["config"]["lr"] == 0.1 and server.run.finish["errors"] == 0


def test_what_it_has_not_is_said() -> None:
    with pytest.raises(AttributeError, match=r"fp8scope.compat.wandb has no 'sweep': it has init, log"):
        wandb.sweep  # noqa: B018
    with pytest.raises(AttributeError, match=r"call wandb.init\(\) before using wandb.config"):
        wandb.config  # noqa: B018
    with pytest.raises(wandb.Error, match=r"call wandb.init\(\) before wandb.log"):
        wandb.log({"x": 1})
    run = wandb.init(mode="disabled")
    assert run.disabled
    with pytest.raises(AttributeError, match="a run has no 'log_artifact'; it has log, config"):
        run.log_artifact  # noqa: B018
    with pytest.raises(TypeError, match="dictionary"):
        run.log(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strings"):
        run.log({1: 2})  # type: ignore[dict-item]
    with pytest.raises(wandb.Error, match="mode must be one of"):
        wandb.init(mode="loud", reinit=True)


def test_settings_ids_and_configurations(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    assert len(wandb.util.generate_id()) == 8 and wandb.login(key="x")
    settings = wandb.Settings(mode="disabled", start_method="thread")
    with wandb.init(settings=settings, config=argparse.Namespace(lr=1)) as run:
        assert run.config.lr == 1 and run.settings.start_method == "thread" and run.settings.anything is None
        assert wandb.init() is run
    assert wandb.run is None
    wandb.init(mode="disabled", config="config.yaml")
    assert "is not read" in caplog.text


def test_a_run_is_resumed_by_its_id(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    run = wandb.init()
    first = run.id
    wandb.log({"x": 1.0})
    wandb.finish()
    again = wandb.init(id=first, resume="must")
    assert again.id == first
    wandb.log({"x": 2.0})
    wandb.finish()
    wandb.init(id="k3j4", resume="allow", mode="offline")
    assert "'k3j4' is no id of a run of fp8scope" in caplog.text
    assert [value for _, value in points(server, "x")] == [1.0, 2.0]


def test_a_failing_script_fails_the_run(server: WireServer) -> None:
    with pytest.raises(ZeroDivisionError), wandb.init():
        wandb.log({"x": 1.0})
        1 / 0  # noqa: B018
    assert server.run.finish["state"] == "failed"


def test_wandb_itself_is_not_imported() -> None:
    program = (
        "import fp8scope.compat.wandb as wandb, sys; print('wandb' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
