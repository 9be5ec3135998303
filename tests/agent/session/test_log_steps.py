"""`run.log(..., step=number)`, nested names, and `fp8scope.log` and `fp8scope.finish`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.process.open_runs import live_runs

pytestmark = pytest.mark.usefixtures("online")


def test_it_works(server: WireServer) -> None:
    """A script without steps of its own makes them by their numbers; a number's calls make one step."""
    run = fp8scope.init(name="by number")
    for number in range(4):
        run.log({"loss": 4.0 - number}, step=number)
        if number % 2 == 0:
            run.log({"accuracy": number / 10}, step=number)
        run.log(learning_rate=0.1)
    run.log({"final": 1.0}, step=100)
    assert run.finish().errors == 0
    stored = server.run
    assert stored.steps == [0, 1, 2, 3, 100]
    assert stored.scalars("loss") == [4.0, 3.0, 2.0, 1.0, None]
    assert stored.scalars("accuracy") == [0.0, None, 0.2, None, None]
    assert stored.scalars("learning_rate") == [0.1] * 4 + [None]
    assert stored.scalars("step") == [None] * 5 and stored.scalars("final")[-1] == 1.0
    assert stored.finish["state"] == "finished"


def test_an_earlier_number_is_not_recorded_and_counted(
    server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = fp8scope.init(name="back and forth")
    run.log({"loss": 1.0}, step=5)
    run.log({"loss": 9.0}, step=3)
    run.log({"loss": 9.0}, step=4)
    run.log({"loss": 2.0}, step=6)
    assert run.finish().errors == 2
    assert server.run.steps == [5, 6] and server.run.scalars("loss") == [1.0, 2.0]
    assert caplog.text.count("run.log(step=3) after step 5: the values are not recorded") == 1


@pytest.mark.parametrize("number", [-1, 2.5, "three", 2**63])
def test_a_number_that_is_none(number: Any, server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    run = fp8scope.init(name="what number")
    run.log({"loss": 9.0}, step=number)
    run.log({"loss": 1.0}, step=torch.tensor(7))  # type: ignore[arg-type]
    assert run.finish().errors == 1 and "logging at a step failed" in caplog.text
    assert server.run.steps == [7] and server.run.scalars("loss") == [1.0]


def test_within_a_block_the_number_of_the_block_counts(
    server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = fp8scope.init(name="blocks")
    run.log({"parameters": 10.0}, step=0)
    for number in range(3):
        with run.step():
            run.log({"loss": float(number)}, step=number)
        run.log({"after": float(number)}, step=number + 1)
    assert run.finish().errors == 0
    assert server.run.steps == [0, 1, 2, 3]
    assert server.run.scalars("loss") == [None, 0.0, 1.0, 2.0]
    # What is logged after a block goes to the next, as without a number, and that is said.
    assert server.run.scalars("after") == [None, None, 0.0, 1.0]
    assert "that step is recorded already" in caplog.text


def test_attached_the_step_that_was_found_counts(server: WireServer) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = fp8scope.attach(model, optimizer, name="attached")
    run.log({"width": 4}, step=0)
    for number in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        run.log({"number": float(number)}, step=number)
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3] and server.run.scalars("number") == [0.0, 1.0, 2.0]
    assert server.run.scalars("width") == [4.0, None, None] and None not in server.run.scalars("loss")


def test_what_is_observed_belongs_to_the_number_that_is_logged_after_it(server: WireServer) -> None:
    """As W&B's users write: train, then log. The next iteration's statistics belong to the next number."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    fp8scope.convert(model, fp8scope.CurrentScaling())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = fp8scope.init(name="watched")
    run.watch(model, optimizer)
    for number in range(4):
        loss = model(torch.full((16, 16), float(2**number))).sum()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss}, step=number)
        run.log({"twice": 2 * loss.item()}, step=number)
    assert run.finish().errors == 0
    stored = server.run
    assert stored.steps == [0, 1, 2, 3] and None not in stored.scalars("twice")
    names = [tensor["name"] for tensor in next(iter(stored.catalogues.values()))]
    amax = [row["tensors"]["amax"][names.index("0.input")] for row in stored.rows]
    assert amax == [1.0, 2.0, 4.0, 8.0]
    assert all(seconds > 0 for seconds in stored.scalars("step_seconds"))  # type: ignore[operator]


def test_nested_names(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    run = fp8scope.init(name="nested")
    loop: dict[str, Any] = {}
    loop["again"] = loop
    run.log({"train": {"loss": 1.0, "by": {"head": torch.tensor(2.0)}}, "plain": 3.0}, step=1)
    run.log({"bad": {"text": "no number", "fine": 4.0}, "loop": loop}, step=1)
    with run.step() as step:
        step.log({"eval": {"loss": 0.5}})
    report = run.finish()
    assert server.run.scalars("train/loss") == [1.0, None] and server.run.scalars("plain") == [3.0, None]
    assert server.run.scalars("train/by/head") == [2.0, None] and server.run.scalars("eval/loss") == [
        None,
        0.5,
    ]
    assert server.run.scalars("bad/fine") == [4.0, None] and report.errors == 2
    assert "logging 'bad/text' failed" in caplog.text


def test_of_the_module(server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    fp8scope.log({"loss": 1.0})
    assert "call fp8scope.init first" in caplog.text and fp8scope.finish() is None
    fp8scope.init(name="of the module")
    for number in range(3):
        fp8scope.log({"loss": 1.0}, step=number)
    report = fp8scope.finish()
    assert report is not None and report.complete and live_runs == []
    assert server.run.steps == [0, 1, 2]


def test_disabled(server: WireServer) -> None:
    run = fp8scope.init(mode="disabled")
    run.log({"loss": 1.0}, step=3)
    assert run.finish().errors == 0 and server.runs == {}


def test_an_exception_does_not_lose_the_step_that_is_open(server: WireServer) -> None:
    with pytest.raises(ValueError, match="mine"), fp8scope.init(name="fails") as run:
        run.log({"loss": 1.0}, step=1)
        raise ValueError("mine")
    assert server.run.steps == [1] and server.run.finish["state"] == "failed"
