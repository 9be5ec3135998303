"""`run.config`, `run.tags` and `run.summary`, read and written while the run goes on."""

import time
from itertools import count

import numpy as np
import pytest
import torch
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

import fp8scope

pytestmark = pytest.mark.usefixtures("online")


def test_it_works(server: WireServer) -> None:
    run = fp8scope.init(name="described", config={"lr": 0.1, "model": {"width": 8}}, tags=["first"])
    assert run.config["lr"] == 0.1 and run.config["model"]["width"] == 8 and run.tags == ("first",)
    assert dict(run.summary) == {} and "lr" in run.config and run.config.get("depth", 3) == 3
    run.config["lr"] = 0.2
    run.config["model"]["depth"] = 4
    run.config.update({"batch": 16}, seed=1)
    run.tags += ("second", "first")
    run.summary["best"] = {"loss": 0.5}
    run.summary.update(accuracy=np.float32(0.25), last=torch.tensor(3.0), shape=(2, 3))
    run.log_config({"late": True})
    run.log({"loss": 1.0}, step=1)
    assert run.finish().errors == 0
    stored = server.run.registration
    expected = {"lr": 0.2, "model": {"width": 8, "depth": 4}, "batch": 16, "seed": 1, "late": True}
    assert stored["config"] == expected == run.config and stored["tags"] == ["first", "second"]
    summary = {"best": {"loss": 0.5}, "accuracy": 0.25, "last": 3.0, "shape": [2, 3]}
    assert stored["summary"] == summary and run.summary["best"]["loss"] == 0.5


def test_changes_are_sent_while_it_runs_and_together(server: WireServer) -> None:
    """A summary that is set in every step does not make a request of every step."""
    run = fp8scope.init(name="often")
    began, numbers = time.monotonic(), count(1)

    def changes() -> bool:
        number = next(numbers)
        with run.step() as step:
            step.log(loss=1.0)
        run.summary["best"] = number
        stored = next(iter(server.runs.values()), None)
        sent = 0 if stored is None else stored.registration.get("summary", {}).get("best", 0)
        return number > 200 and sent > 1

    wait_until(changes, "a later summary", pause=0.002)
    registered = [path for method, path in server.requests if method == "PUT"]
    # The first one, and at most one a second after that.
    assert len(registered) <= 2 + (time.monotonic() - began)
    run.finish()
    assert server.run.registration["summary"]["best"] == next(numbers) - 1


def test_another_rank_does_not_undo_tags(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_RUN_ID", "12345678-1234-5678-1234-567812345678")
    first, second = fp8scope.init(name="ranks", tags=["a"]), fp8scope.init(name="ranks", tags=["a"])
    first.tags = ("b",)
    first.log({"loss": 1.0}, step=1)
    first.finish()
    second.config["from"] = "the second"
    second.log({"loss": 1.0}, step=1)
    second.finish()
    assert server.run.registration["tags"] == ["b"]
    assert server.run.registration["config"] == {"from": "the second"}


def test_what_cannot_be_set(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    run = fp8scope.init(name="limits", tags=["kept"])
    run.tags = ["x" * 65]
    run.tags = [str(number) for number in range(51)]
    assert run.tags == ("kept",) and "setting the tags failed" in caplog.text
    run.summary["api_key"] = "very secret"
    run.config["nan"] = float("nan")
    assert run.finish().errors == 2
    run.summary["late"] = 1
    run.tags = ("late",)
    assert "run.summary: the run is finished" in caplog.text and run.tags == ("kept",)
    assert server.run.registration["summary"] == {"api_key": "[redacted]"}
    assert server.run.registration["config"] == {"nan": "nan"} and server.run.registration["tags"] == ["kept"]


def test_disabled_it_can_be_read_and_written(server: WireServer) -> None:
    run = fp8scope.init(mode="disabled", config={"lr": 0.1})
    run.config["lr"] = 0.2
    run.summary["best"] = 1
    run.tags = ["a"]
    assert run.config["lr"] == 0.2 and run.summary["best"] == 1 and run.tags == ("a",)
    assert server.runs == {}
