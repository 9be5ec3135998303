"""`attach` records every step of an ordinary training loop."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from agent.helpers.loops import TinyLm, batch, language_model, lm_loss, regression, squares, train
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope

pytestmark = pytest.mark.usefixtures("online")


def names_of(server: WireServer) -> list[str]:
    return [tensor["name"] for tensor in next(iter(server.run.catalogues.values()))]


def test_it_works(server: WireServer) -> None:
    model, optimizer = language_model()
    fp8scope.convert(model, fp8scope.DelayedScaling())
    run = fp8scope.attach(model, optimizer, name="two lines", group="fp8", seed=3, total_steps=5)
    losses = train(model, optimizer, 5, lm_loss)
    report = run.finish()

    stored = server.run
    assert report.complete and report.errors == 0
    assert stored.registration["name"] == "two lines" and stored.registration["seed"] == 3
    assert stored.registration["precision"] == "fp8"
    assert stored.steps == [1, 2, 3, 4, 5]
    assert stored.scalars("loss") == pytest.approx(losses, rel=1e-6)
    # Four rows of eight tokens a step.
    assert stored.scalars("tokens") == [32.0 * step for step in range(1, 6)]
    assert all(value and value > 0 for value in stored.scalars("step_seconds"))
    assert stored.scalars("learning_rate") == [1e-2] * 5
    amax = [row["tensors"]["amax"] for row in stored.rows]
    assert names_of(server)[:1] == ["body.0.input"] and all(value > 0 for row in amax for value in row)


def test_the_training_is_the_same_with_and_without() -> None:
    model, optimizer = language_model()
    alone = train(model, optimizer, 6, lm_loss)
    model, optimizer = language_model()
    run = fp8scope.attach(model, optimizer)
    assert train(model, optimizer, 6, lm_loss) == alone
    assert run.finish().errors == 0


def test_values_logged_around_a_step_belong_to_it(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    run.log(before_everything=1, tokens=64)
    for number in range(3):
        loss = squares(model, number)
        run.log(after_forward=number)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        run.log(after_step=number, accuracy=torch.tensor(number / 2))
    run.log({"eval/loss": 7.0})
    assert run.finish().errors == 0
    stored = server.run
    assert stored.steps == [1, 2, 3]
    assert stored.scalars("before_everything") == [1, None, None]
    assert stored.scalars("tokens") == [64, None, None]
    assert stored.scalars("after_forward") == stored.scalars("after_step") == [0, 1, 2]
    assert stored.scalars("accuracy") == [0, 0.5, 1] and stored.scalars("eval/loss") == [None, None, 7.0]


def test_a_logged_loss_overrides_the_observed_one(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    for number in range(3):
        train(model, optimizer, 1)
        run.log(loss=100.0 + number)
    run.finish()
    assert server.run.scalars("loss") == [100.0, 101.0, 102.0]


def test_tokens_are_counted_given_or_logged(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, name="given", tokens_per_step=50)
    train(model, optimizer, 2)
    run.finish()
    assert server.run.scalars("tokens") == [50, 100]
    server.runs.clear()
    run = fp8scope.attach(model, optimizer, name="logged")
    for tokens in (3, 4):
        train(model, optimizer, 1)
        run.log(tokens=tokens)
    run.finish()
    assert server.run.scalars("tokens") == [3, 7]
    assert [name for row in server.run.rows for name in row["scalars"]].count("tokens_per_second") == 2


def test_floating_point_inputs_are_not_counted_as_tokens(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    train(model, optimizer, 1)
    run.finish()
    assert "tokens" not in server.run.rows[0]["scalars"]


def test_evaluation_does_not_make_a_step(server: WireServer) -> None:
    model, optimizer = language_model()
    run = fp8scope.attach(model, optimizer)
    for number in range(3):
        train(model, optimizer, 1, lm_loss)
        model.eval()
        lm_loss(model, number, rows=64)  # evaluation mode, with gradients
        with torch.no_grad():
            lm_loss(model, number, rows=64)
            model.train()
            lm_loss(model, number, rows=64)  # training mode, without
    run.finish()
    assert server.run.steps == [1, 2, 3] and server.run.scalars("tokens") == [32, 64, 96]


def test_evaluation_time_is_not_part_of_a_step(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    waited = torch.tensor(0.0)
    for _ in range(2):
        train(model, optimizer, 1)
        model.eval()
        for number in range(300):
            waited = waited + squares(model, number).detach()
        model.train()
    run.finish()
    seconds = [row["scalars"]["step_seconds"] for row in server.run.rows]
    parts = [
        sum(row["scalars"][f"time_{p}"] for p in ("forward", "backward", "optimizer"))
        for row in server.run.rows
    ]
    # The clock stopped when optimizer.step() returned: no step has the evaluation after it in it.
    assert all(part <= second for part, second in zip(parts, seconds, strict=True))
    assert server.run.rows[1]["scalars"]["time_other"] > seconds[1] - parts[1]


def test_works_with_autocast_and_a_scheduler(server: WireServer) -> None:
    model, optimizer = language_model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run = fp8scope.attach(model, optimizer)
    losses = []
    for number in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = lm_loss(model, number)
        losses += train_on(loss, optimizer)
        scheduler.step()
    assert run.finish().errors == 0
    assert server.run.scalars("loss") == pytest.approx(losses)
    assert server.run.scalars("learning_rate") == [1e-2, 5e-3, 2.5e-3, 1.25e-3]


def train_on(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


@pytest.mark.parametrize("which", ["compiled", "inner", "in place"])
def test_records_a_compiled_model(which: str, server: WireServer) -> None:
    model, optimizer = language_model()
    called: nn.Module = model
    if which == "in place":
        model.compile(backend="eager", fullgraph=True)
    else:
        called = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[assignment]
    run = fp8scope.attach(called if which == "compiled" else model, optimizer)
    losses = train(called, optimizer, 4, lm_loss)
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3, 4] and server.run.scalars("loss") == pytest.approx(losses)
    # The names are the model's, whatever it is wrapped in.
    assert "body.0.weight" in names_of(server)
    # A model that is called from inside a graph tells nothing of its inputs.
    tokens = [None] * 4 if which == "inner" else [32.0, 64.0, 96.0, 128.0]
    assert server.run.scalars("tokens") == tokens


@pytest.mark.parametrize("fullgraph", [False, True])
def test_records_the_precision_of_a_model_compiled_in_place(fullgraph: bool, server: WireServer) -> None:
    model, optimizer = language_model()
    model.compile(backend="eager", fullgraph=fullgraph)
    compiled = model._compiled_call_impl
    run = fp8scope.attach(model, optimizer)

    def loss_of(model: nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return lm_loss(model, number)

    train(model, optimizer, 3, loss_of)
    copied = pickle.loads(pickle.dumps(model))
    assert run.finish().errors == 0
    assert server.run.registration["precision"] == "bf16"
    for name in ("time_forward", "time_backward", "model_flops_per_second"):
        assert all((value or 0) > 0 for value in server.run.scalars(name)[1:])
    assert model._compiled_call_impl is compiled and copied._compiled_call_impl is None


def test_detach_removes_all_hooks(server: WireServer) -> None:
    model, optimizer = regression()
    hooks = [dict(model._forward_pre_hooks), dict(optimizer._optimizer_step_post_hooks)]
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
    run = fp8scope.attach(model, optimizer)
    assert torch.autograd.backward is not backward
    train(model, optimizer, 2)
    run.detach()
    run.detach()
    assert torch.autograd.backward is backward and torch.amp.GradScaler.scale is scale
    train(model, optimizer, 2)
    # After detach, explicit steps continue the run's numbering.
    with run.step() as step:
        step.log(loss=1.0)
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss")[2] == 1.0
    assert [dict(model._forward_pre_hooks), dict(optimizer._optimizer_step_post_hooks)] == hooks


def test_an_unfinished_step_is_not_recorded(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    train(model, optimizer, 2)
    squares(model, 0).backward()  # type: ignore[no-untyped-call]
    run.log_eval("held out", "accuracy", [1, 0])
    run.finish()
    assert server.run.steps == [1, 2]


def test_does_not_keep_the_model_alive() -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    train(model, optimizer, 2)
    gone: list[weakref.ref[Any]] = [weakref.ref(one) for one in (model, optimizer, next(model.parameters()))]
    # At once, without the collector of cycles: memory on a device would otherwise be held for a while.
    gc.disable()
    try:
        del model, optimizer
        assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()
    run.finish()


def test_copies_and_pickles_are_not_recorded(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    train(model, optimizer, 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(other, torch.optim.SGD(other.parameters(), lr=0.1), 3)
        assert isinstance(other(batch(0)), torch.Tensor)
    copy.deepcopy(optimizer).step(None)
    train(model, optimizer, 1)
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2]


def test_a_disabled_run_adds_no_hooks() -> None:
    model, optimizer = regression()
    backward = torch.autograd.backward
    run = fp8scope.attach(model, optimizer, mode="disabled")
    assert torch.autograd.backward is backward and not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    run.log(loss=1.0)
    assert run.finish().complete


def test_alerts_are_delivered_to_the_training_thread(server: WireServer) -> None:
    class Stop(Exception):
        pass

    def stop(alert: fp8scope.Alert) -> None:
        raise Stop(alert.kind)

    alert = {"id": 1, "kind": "spike", "severity": "critical", "step": 1, "onset_step": 1, "value": None}
    server.alerts.append(alert | {"threshold": None, "message": "m", "opened_at": "2026-01-01T00:00:00Z"})
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    run.on_alert(stop)
    with pytest.raises(Stop, match="spike"):
        train(model, optimizer, 1_000_000)
    run.session.drop_callbacks()
    assert run.finish().complete


def test_tiny_lm_is_what_the_tests_say() -> None:
    assert TinyLm()(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 96)
