"""What goes wrong in a reference window stays out of the training; what cannot be meant is refused."""

from typing import Any

import pytest
import torch
from agent.helpers.reference_training import Training, begin, equal, explicit, plain
from agent.helpers.wire_server import WireServer

from fp8scope.config import ConfigurationError, Settings
from fp8scope_kernels import fp8_layers


def test_it_works(settings: Settings, server: WireServer, caplog: pytest.LogCaptureFixture) -> None:
    """The arm runs out of memory, say. The training goes on as it would have, and windows are given up."""
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> torch.Tensor:
        if any(layer.precision == "bf16" for _, layer in fp8_layers(training.model)):
            training.model.up.weight.data.add_(1.0)
            raise RuntimeError("out of memory")
        return training.step(batch)

    train_step = run.reference_window(
        step, training.model, training.optimizer, every=4, steps=2, scheduler=training.scheduler
    )
    losses = explicit(training, run, train_step)
    state = training.state()
    run.finish()
    expected_losses, expected_state = plain(settings)
    assert equal(losses, expected_losses) and equal(state, expected_state)
    assert server.run.reports_of("reference") == [] and "out of memory" in caplog.text
    assert run.guard.counts()[1] == 3, "after three it is not tried again"


def test_an_interruption_passes_through_and_all_is_put_back(settings: Settings) -> None:
    training, run = Training(), begin(settings)
    before: list[list[torch.Tensor]] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        if any(layer.precision == "bf16" for _, layer in fp8_layers(training.model)):
            raise KeyboardInterrupt
        loss = training.step(batch)
        before.append([parameter.detach().clone() for parameter in training.model.parameters()])
        return loss

    train_step = run.reference_window(step, training.model, training.optimizer, every=4, steps=2)
    with pytest.raises(KeyboardInterrupt):
        explicit(training, run, train_step)
    assert equal([parameter.detach() for parameter in training.model.parameters()], before[-1])
    assert {layer.precision for _, layer in fp8_layers(training.model)} == {"fp8"}


def test_what_the_scripts_step_raises_is_the_scripts(settings: Settings) -> None:
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    train_step = run.reference_window(step, training.model, training.optimizer, every=4, steps=2)
    with pytest.raises(ZeroDivisionError):
        train_step(torch.zeros(1))


def test_a_step_without_a_loss_is_told(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> None:
        training.step(batch)

    explicit_step = run.reference_window(step, training.model, training.optimizer, every=2, steps=2)
    for batch in training.batches():
        explicit_step(batch)
    assert "train_step must return the loss" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": 1}, "every must be"),
        ({"every": 2.5}, "every must be"),
        ({"steps": 1}, "steps must be"),
        ({"steps": 9, "every": 8}, "at most every"),
        ({"steps": 1001, "every": 5000}, "at most 1000"),
        ({"policy": "panic"}, "policy must be"),
        ({"tolerance": 0}, "tolerance must be"),
        ({"tolerance": float("nan")}, "tolerance must be"),
        ({"keep_on": "moon"}, "keep_on must be"),
        ({"also": [object()]}, "has no state_dict"),
        ({"optimizer": None}, "torch.optim.Optimizer"),
        ({"train_step": 3}, "train_step must be"),
    ],
    ids=[
        *("every 1", "every 2.5", "steps 1", "steps 9 every 8", "steps 1001", "policy", "tolerance 0"),
        *("tolerance nan", "keep_on", "also", "optimizer", "train_step"),
    ],
)
def test_arguments_are_checked_at_once(change: dict[str, Any], message: str, settings: Settings) -> None:
    training, run = Training(), begin(settings)
    arguments: dict[str, Any] = {
        "train_step": training.step,
        "model": training.model,
        "optimizer": training.optimizer,
        "every": 8,
        "steps": 4,
        **change,
    }
    if arguments["optimizer"] is None:
        arguments["optimizer"] = [object()]
    with pytest.raises(ConfigurationError, match=message):
        run.reference_window(**arguments)
