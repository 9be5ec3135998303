"""`attach` refuses invalid arguments immediately and leaves no hooks behind."""

from typing import Any

import pytest
import torch
from agent.helpers.loops import language_model, regression, squares, train
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.autolog.inspection import token_count
from fp8scope.process.open_runs import live_runs


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")


def test_it_works() -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, [optimizer])
    assert train(model, optimizer, 2) and run.finish().errors == 0


MODEL, OPTIMIZER = regression()
OTHER, FOR_OTHER = language_model()


@pytest.mark.parametrize(
    ("model", "optimizer", "arguments", "message"),
    [
        (nn.GELU(), OPTIMIZER, {}, "has no parameters"),
        (MODEL, FOR_OTHER, {}, "AdamW has no parameter of the model"),
        (MODEL, [OPTIMIZER, FOR_OTHER], {}, "AdamW has no parameter of the model"),
        (MODEL, [], {}, "has no optimizer"),
        (OPTIMIZER, MODEL, {}, "must be a torch.nn.Module, got a SGD"),
        (MODEL, MODEL, {}, "must be a torch.optim.Optimizer, got a Sequential"),
        (MODEL, None, {}, "must be a torch.optim.Optimizer, got a NoneType"),
        ({"g": MODEL, "d": OTHER}, {"g": OPTIMIZER}, {}, "got models 'g', 'd' and optimizers 'g'"),
        ({"g": MODEL, "d": OTHER}, {"g": FOR_OTHER, "d": OPTIMIZER}, {}, "no parameter of the model 'g'"),
        ({}, {}, {}, r"got models \(none\)"),
        (MODEL, OPTIMIZER, {"tokens_per_step": -1}, "tokens_per_step must not be negative"),
        (MODEL, OPTIMIZER, {"tokens_per_step": "many"}, "tokens_per_step must be a whole number"),
        (MODEL, OPTIMIZER, {"reduction": "median"}, "reduction must be one of mean, sum"),
        (MODEL, OPTIMIZER, {"mode": "fast"}, "mode must be one of"),
        (MODEL, OPTIMIZER, {"name": ""}, "name must not be empty"),
    ],
)
def test_invalid_arguments_are_refused(
    model: Any, optimizer: Any, arguments: dict[str, Any], message: str
) -> None:
    backward = torch.autograd.backward
    with pytest.raises(fp8scope.ConfigurationError, match=message):
        fp8scope.attach(model, optimizer, **arguments)
    assert live_runs == [] and torch.autograd.backward is backward
    assert not MODEL._forward_pre_hooks and not OPTIMIZER._optimizer_step_post_hooks


def test_an_unknown_argument_raises_type_error() -> None:
    with pytest.raises(TypeError, match="projekt"):
        fp8scope.attach(MODEL, OPTIMIZER, projekt="a slip of the pen")
    assert live_runs == []


def test_refuses_a_model_that_is_already_attached() -> None:
    model, optimizer = regression()
    first = fp8scope.attach(model, optimizer, name="first")
    with pytest.raises(fp8scope.ConfigurationError, match="already attached to the run 'first'.*finish"):
        fp8scope.attach(model, optimizer, name="second")
    assert live_runs == [first]
    train(model, optimizer, 1)
    first.detach()
    second = fp8scope.attach(model, optimizer, name="second")
    train(model, optimizer, 1)
    second.finish()
    third = fp8scope.attach(model, optimizer, name="third")
    assert third.finish().errors == 0


def test_after_finish_nothing_is_recorded(
    server: WireServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "online")
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, url=server.url, token=server.token)
    train(model, optimizer, 2)
    report = run.finish()
    train(model, optimizer, 2)
    for _ in range(2):
        run.log(loss=1.0)
    run.detach()
    assert run.finish() is report and server.run.steps == [1, 2]
    assert caplog.text.count("the run is finished") == 1


def test_warns_about_values_logged_after_the_last_step(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    train(model, optimizer, 1)
    run.detach()
    run.log(accuracy=0.5)
    run.finish()
    assert "no step followed that accuracy could be recorded with" in caplog.text


def test_refuses_invalid_logged_values(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    squares(model, 0).backward()  # type: ignore[no-untyped-call]
    run.log({"a name with spaces": 1}, text="no number", tokens="many", matrix=torch.ones(2, 2))
    optimizer.step()
    assert run.finish().errors == 4
    for name in ("'a name with spaces'", "'text'", "'tokens'", "'matrix'"):
        assert name in caplog.text


IDS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((IDS,), {}, 10),
        ((IDS, IDS + 1), {}, 10),  # inputs and targets
        ((), {"input_ids": IDS, "labels": IDS[:, :1], "attention_mask": IDS.bool()}, 10),
        (({"input_ids": IDS, "position_ids": IDS[:1]},), {}, 10),
        ((), {"input_ids": IDS.flatten(), "cu_seqlens": IDS[0]}, 10),  # packed into one dimension
        ((torch.ones(2, 3, 8, 8), IDS[:, 0]), {}, 0),  # images and their classes
        ((IDS, IDS[:, :3]), {}, 0),  # two sequences: which of them?
        ((IDS.to(torch.uint8),), {}, 0),
        (("text", None, 3), {"scale": 2.0}, 0),
        ((), {}, 0),
    ],
)
def test_counts_tokens_of_integer_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    assert token_count(args, kwargs) == tokens
